"""The certificate: measured proof that two models compute the same function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l0prune.capture.recording import Call, Inputs, examples_in, filled, record
from l0prune.errors import CertificateError
from l0prune.exporting.certify.float64 import InFloat64
from l0prune.exporting.slicing.dtypes import cast, converted

# Relative to the largest output: rounding in float64, and in float32.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# A model that rounds by more than that all by itself is allowed two such errors, its own and the
# other model's; but no more than this, beyond which float32 proves nothing.
LARGEST = 1e-4

_NUMBERS = (bool, int, str)  # what an output may hold beside tensors, and must be the same

Compared = Literal["dense", "class", "onnx"]


@dataclass(frozen=True)
class Check:
    """One comparison with the gated model.

    Attributes:
        what: ``dense`` (the sliced graph), ``class`` (the model's own class at the new sizes) or
            ``onnx`` (the file, run by ONNX Runtime).
        dtype: ``float64`` or ``float32``.
        batch: examples in the batch.
        error: largest absolute difference over the largest absolute output.
        tolerance: what it must not exceed.
        part: the submodule that was compared, where not the whole model was.
    """

    what: Compared
    dtype: str
    batch: int
    error: float
    tolerance: float
    part: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Certificate:
    """All comparisons of an export. It exists only if every one of them passed."""

    checks: tuple[Check, ...]

    def __post_init__(self) -> None:
        failed = [check for check in self.checks if not check.passed]
        if failed:
            lines = [
                f"  {c.what} in {c.dtype}, batch of {c.batch}: {c.error:.2e} of the output's "
                f"scale, allowed {c.tolerance:.1e}"
                for c in failed
            ]
            raise CertificateError(
                "The exported model does not compute what the gated one does, so nothing was "
                "written:\n" + "\n".join(lines) + "\nThe usual cause is a model whose forward is "
                "random in ways of its own (a generator, numpy) or depends on global state; "
                "otherwise it is a fault in l0prune: please report it with the model's code."
            )

    def without(self, what: Compared) -> Certificate:
        """The certificate without the comparisons of this kind."""
        return Certificate(tuple(check for check in self.checks if check.what != what))

    def with_checks(self, checks: Sequence[Check]) -> Certificate:
        """This certificate and further checks.

        Raises:
            CertificateError: one of them failed.
        """
        return Certificate((*self.checks, *checks))

    def worst(self, what: Compared, dtype: str) -> float | None:
        """The largest error of a kind of comparison, None if there was none."""
        errors = [c.error for c in self.checks if c.what == what and c.dtype == dtype]
        return max(errors, default=None)

    def summary(self) -> list[tuple[Check, tuple[int, ...]]]:
        """The worst check of each kind, with the sizes of all batches that were compared so."""
        kinds: dict[tuple[str, str, str], list[Check]] = defaultdict(list)
        for check in self.checks:
            kinds[check.what, check.part, check.dtype].append(check)
        return [
            (max(alike, key=lambda check: check.error), tuple(sorted({c.batch for c in alike})))
            for alike in kinds.values()
        ]

    def to_dict(self) -> list[dict[str, Any]]:
        """The checks as plain data."""
        return [asdict(check) for check in self.checks]


def compare(
    gated: nn.Module, dense: nn.Module, inputs: Sequence[Inputs], what: Compared = "dense"
) -> list[Check]:
    """Compare two models on the CPU in float64 and float32.

    In float32 they may differ by 1e-5, or by twice what rounding alone does to the gated model.

    Raises:
        CertificateError: one of them cannot be run.
    """
    checks = []
    for dtype in (torch.float64, torch.float32):
        first, second = (converted(m, dtype) for m in (gated, dense))
        for given in inputs:
            error = difference(_output(first, given, dtype), _output(second, given, dtype))
            name = str(dtype).removeprefix("torch.")
            allowed = _allowed(gated, given, error, dtype)
            checks.append(Check(what, name, examples_in(given), error, allowed))
    return checks


def compare_in_parts(
    gated: nn.Module, dense: nn.Module, paths: Sequence[str], inputs: Sequence[Inputs]
) -> list[Check]:
    """Compare two models of which only the submodules at ``paths`` differ.

    In float64 they run as a whole: all that those submodules return on the way, and the output.
    Then each submodule is given what it receives in the gated model, since in float32 the code
    between them may turn a rounding into another decision (a threshold, a sort).

    Raises:
        CertificateError: one of them cannot be run.
    """
    checks = []
    for dtype in (torch.float64, torch.float32):
        first, second = (converted(m, dtype) for m in (gated, dense))
        name = str(dtype).removeprefix("torch.")
        for given in inputs:
            calls = _calls(first, paths, given, dtype)
            if dtype == torch.float64:
                other = _calls(second, paths, given, dtype)
                error = difference([c.output for c in calls], [c.output for c in other])
                checks.append(Check("dense", name, examples_in(given), error, TOLERANCE[name]))
            for call in calls[:-1]:
                received = filled(call.inputs)
                parts = [model.get_submodule(call.path) for model in (first, second)]
                error = difference(*(_output(part, received, dtype) for part in parts))
                allowed = _allowed(parts[0], received, error, dtype)
                batch = examples_in(received)
                checks.append(Check("dense", name, batch, error, allowed, call.path))
    return checks


def _calls(model: nn.Module, paths: Sequence[str], given: Inputs, dtype: torch.dtype) -> list[Call]:
    """Every call of the submodules and, last, that of the model."""
    with _running_in(dtype):
        return record(model, [*paths, ""], cast(given, dtype))


def compare_onnx(
    gated: nn.Module,
    run: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[Inputs],
    part: str = "",
) -> list[Check]:
    """Compare an ONNX session with the gated model, or a part of it, in float32."""
    model = converted(gated, torch.float32)
    checks = []
    for given in inputs:
        leaves = pytree.tree_leaves(cast(given, torch.float32))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        expected = pytree.tree_leaves(_output(model, given, torch.float32))
        error = difference([leaf for leaf in expected if isinstance(leaf, Tensor)], run(tensors))
        allowed = _allowed(gated, given, error, torch.float32)
        checks.append(Check("onnx", "float32", examples_in(given), error, allowed, part))
    return checks


def _allowed(gated: nn.Module, given: Inputs, error: float, dtype: torch.dtype) -> float:
    """The tolerance; in float32 the model's own rounding is looked up where it matters."""
    usual = TOLERANCE[str(dtype).removeprefix("torch.")]
    if error <= usual or dtype == torch.float64:
        return usual
    outputs = [
        _output(converted(gated, each), given, each) for each in (torch.float64, torch.float32)
    ]
    both = 2 * difference(*outputs)
    return min(both, LARGEST) if both > usual else usual


def _output(model: nn.Module, given: Inputs, dtype: torch.dtype) -> Any:
    """What a model that is in ``dtype`` computes, in that dtype throughout.

    The next one draws the same random numbers, if it draws any.
    """
    args, kwargs = cast(given, dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _running_in(dtype):
        return model(*args, **kwargs)


@contextmanager
def _running_in(dtype: torch.dtype) -> Iterator[None]:
    """Whatever a model raises while it runs in ``dtype``, as a CertificateError."""
    name = str(dtype).removeprefix("torch.")
    try:
        with InFloat64() if dtype == torch.float64 else nullcontext():
            yield
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise CertificateError(
            f"The exported model could not be compared with the gated one, because running in "
            f"{name} failed with {type(error).__name__}: {first}. Nothing was written. The usual "
            "cause is a tensor that model.double() does not convert: a plain attribute that should "
            "be a buffer (register_buffer), or a dtype fixed in code the model calls."
        ) from error


def is_valid(model: nn.Module, given: Inputs) -> bool:
    """Does the model take these inputs, and make numbers of them? Asked in float64."""
    try:
        output = _output(converted(model, torch.float64), given, torch.float64)
    except CertificateError:
        return False
    return not any(leaf.isnan().any() for leaf in _comparable(output) if isinstance(leaf, Tensor))


def difference(expected: Any, found: Any) -> float:
    """Largest difference over all output tensors, each relative to its own largest value.

    Infinite where shapes, or numbers that are no tensors, are not the same.
    """
    firsts, seconds = _comparable(expected), _comparable(found)
    if len(firsts) != len(seconds) or any(
        a != b if isinstance(a, _NUMBERS) or isinstance(b, _NUMBERS) else a.shape != b.shape
        for a, b in zip(firsts, seconds, strict=True)
    ):
        return float("inf")
    errors = []
    for a, b in zip(firsts, seconds, strict=True):
        if isinstance(a, _NUMBERS):
            continue
        if a.numel():
            a, b = a.double(), b.double()
            gap = torch.where(a == b, 0, (a - b).abs())  # equal infinities are no difference
            largest = torch.where(a.isinf(), 0, a).abs().max()
            errors.append(float(gap.max() / largest.clamp(min=torch.finfo(torch.float32).tiny)))
    return max(errors, default=0.0) if not any(e != e for e in errors) else float("nan")


def _comparable(output: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (Tensor, *_NUMBERS))]
