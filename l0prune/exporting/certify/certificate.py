"""The certificate: measured proof that two models compute the same function."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from l0prune.capture.example_inputs import (
    Call,
    examples_given,
    examples_in,
    filled,
    record,
    tensors_in,
)
from l0prune.capture.last_place import TIMES
from l0prune.capture.outputs import tensor_names
from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import (
    Answer,
    answers_of,
    holds_nan,
    output_of,
    running_in,
)
from l0prune.exporting.certify.difference import differences, largest
from l0prune.exporting.certify.dtypes import cast, lent, name_of
from l0prune.running.device import device_of

# Allowed rounding error in float64 and float32, relative to the largest output.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# If the gated model's own rounding in one run is larger, twice that is allowed (both models round);
# if that is too little, ``TIMES`` the rounding as measured in several runs. But no more than this;
# beyond it an error counts as rounding only up to what was measured of the model itself, or up to
# ``TIMES`` of what the runtime rounds on the same inputs.
LARGEST = 1e-4
_LARGEST_OWN = 1e-3  # and no more than this, beyond which float32 proves nothing
_TIMES_OWN = 100  # and no more than so many times what PyTorch rounds
# Rounding is measured by results that are moved, not by sums within operators: of a model that is
# exact in float64, up to so many times what was measured is rounding, but no more than ``LARGEST``.
_TIMES_EXACT = 5
# A file whose values are all float64 is exact up to its constants and weights, which are float32.
_EXACT = 1e-6
# Cut far down, a network's outputs may vanish beside those it has with all gates open. A runtime's
# sigmoid, say, is right to a unit in the last place of 1, so that units of these are rounding, too.
_UNIT = 4 * 2**-24


@dataclass(frozen=True)
class RuntimeRounding:
    """Rounding of the gated network's outputs in a runtime.

    Attributes:
        errors: the largest difference of each output tensor from the exact one.
        open_scales: the largest value of each with all gates open.
        is_other: whether they are of a network that computes something else, such as the one
            before its weights were fitted anew. Its own rounding in float32 is then another, and
            the runtime's adds to that of the network that is compared.
    """

    errors: Sequence[float] = ()
    open_scales: Sequence[float] = ()
    is_other: bool = False


OwnRounding = Callable[[Inputs], RuntimeRounding]  # on inputs of the gated model


def unknown(inputs: Inputs) -> RuntimeRounding:
    """Return no rounding: of a runtime in which it cannot be measured."""
    return RuntimeRounding()


MODEL: tuple[str, ...] = ("graph", "class")  # kinds of module that the user gets


@dataclass(frozen=True)
class Check:
    """One comparison of two models.

    Attributes:
        what: at the new sizes ``graph`` (the captured graph) or ``class`` (the model's own class);
            ``program`` (its ``torch.export`` program), ``onnx`` (the file, run by ONNX Runtime),
            ``openvino`` (the same, run by OpenVINO, if installed), ``executorch`` and ``litert``
            (the file in that runtime), ``source`` (the file that the model was made from, before
            any cut).
        dtype: ``float64`` or ``float32``.
        batch: examples in the batch.
        error: largest absolute difference over the largest absolute output on all inputs that
            were compared together; if rounding had to be measured, of the output whose error is
            nearest to what its rounding allows.
        tolerance: the largest error allowed.
        rounding: error that float32 alone makes in the model compared with, or in its output of
            that error; None in float64, and where it is unknown.
        part: the submodule that was compared, if not the whole model.
        inputs: the shapes of the input tensors. Memory inputs, such as a cache, have the small
            model's shape: of the slots that stayed.
        outputs: name and error of each output, if there are several.
        against: the ``gated`` model, or the ``module`` that the user gets: always for a program,
            and for a file if the module was trained further.
    """

    what: str
    dtype: str
    batch: int
    error: float
    tolerance: float
    part: str = ""
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[str, float], ...] = ()
    against: Literal["gated", "module"] = "gated"
    rounding: float | None = None

    @property
    def passed(self) -> bool:
        """Check that the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance

    @property
    def is_of_rounding(self) -> bool:
        """Check that float32 alone explains the error, though it is more than may be allowed."""
        return self.rounding is not None and self.error <= TIMES * self.rounding


_USUAL = (
    "The usual cause is a model whose forward is random in ways of its own (a generator, numpy) or "
    "depends on global state; otherwise it is a fault in l0prune: please report it with the "
    "model's code."
)
_OF_ROUNDING = (
    "In float64 they agree, so that nothing is wrong with the cut. In float32 the model rounds by "
    f"about as much all by itself, and where that is more than {_LARGEST_OWN:.0e} a comparison of "
    "files in float32 shows nothing. Rounding is largest in networks that were hardly trained, and "
    "in norms whose statistics are of a few examples: it falls with training on more, or for "
    "longer."
)
_OF_SIZES = (
    "With inputs of {} they agree. The usual cause is code that goes by a size (an if on x.shape, "
    "a squeeze() without a dim): write it without, or leave that size out of the free ones "
    "(dynamic_shapes, --dynamic)."
)
_OF_NAN = (
    "Outputs that hold nan cannot be compared. The usual cause is a nan or an infinity among the "
    "weights, as a training that diverged leaves it."
)


@dataclass(frozen=True)
class Certificate:
    """Comparisons of an export, all of which passed."""

    checks: tuple[Check, ...]

    def __post_init__(self) -> None:
        failed = [check for check in self.checks if not check.passed]
        if failed:
            lines = [
                f"  {c.what} in {c.dtype}, inputs of {_sizes(c)}: {c.error:.2e} of the output's "
                f"scale, allowed {c.tolerance:.1e}"
                + (f" (rounding alone: {c.rounding:.1e})" if c.rounding is not None else "")
                for c in failed
            ]
            pair = ("exported model", "gated one")
            if failed[0].against == "module":
                pair = (failed[0].what, "exported module as it is now")
            raise CertificateError(
                "The {} does not compute what the {} does, so nothing was written:\n".format(*pair)
                + "\n".join(lines)
                + "\n"
                + self._cause(failed)
            )

    def _cause(self, failed: Sequence[Check]) -> str:
        """Return the usual cause of the failure, with advice."""
        if all(math.isnan(check.error) for check in failed):
            return _OF_NAN
        is_exact = any(check.dtype == "float64" for check in self.checks if check.passed)
        if is_exact and all(check.is_of_rounding for check in failed):
            return _OF_ROUNDING
        kinds, sizes = {check.what for check in failed}, {check.inputs for check in failed}
        right = [c for c in self.checks if c.what in kinds and c.passed]
        is_rounding = min(check.error for check in failed) <= _LARGEST_OWN
        if right and not is_rounding and sizes.isdisjoint(check.inputs for check in right):
            return _OF_SIZES.format(_sizes(right[0]))
        return _USUAL

    def without(self, *what: str) -> Certificate:
        """Return the certificate without the comparisons of these kinds."""
        return Certificate(tuple(check for check in self.checks if check.what not in what))

    def of_module(self) -> Certificate:
        """Return a certificate of the comparisons with the exported ``module`` only."""
        return Certificate(tuple(check for check in self.checks if check.against == "module"))

    def with_checks(self, checks: Sequence[Check]) -> Certificate:
        """Return the certificate with further checks.

        Raises:
            CertificateError: one of them failed.
        """
        return Certificate((*self.checks, *checks))

    def worst(self, what: str | Collection[str], dtype: str) -> float | None:
        """Return the largest error of one or several kinds of comparison; None without any."""
        kinds = (what,) if isinstance(what, str) else what
        errors = [c.error for c in self.checks if c.what in kinds and c.dtype == dtype]
        return max(errors, default=None)

    def summary(self) -> list[tuple[Check, tuple[int, ...]]]:
        """Return the worst check of each kind, part and dtype, with all batch sizes compared."""
        kinds: dict[tuple[str, str, str], list[Check]] = defaultdict(list)
        for check in self.checks:
            kinds[check.what, check.part, check.dtype].append(check)
        return [
            (max(alike, key=lambda check: check.error), tuple(sorted({c.batch for c in alike})))
            for alike in kinds.values()
        ]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the checks as JSON-compatible data."""
        return [
            {
                **asdict(check),
                "inputs": [list(shape) for shape in check.inputs],
                "outputs": dict(check.outputs),
            }
            for check in self.checks
        ]


def _sizes(check: Check) -> str:
    """Return the shapes of a comparison's inputs, or its batch where these are not known."""
    shapes = (" × ".join(map(str, shape)) for shape in check.inputs if shape)
    return ", ".join(shapes) or f"batch {check.batch}"


def compare(
    answers: Sequence[Answer], small: nn.Module, what: str = "graph", part: str = ""
) -> Iterator[Check]:
    """Compare a model, or a part of it, with the gated model's answers, each in its dtypes.

    In float32 the tolerance is 1e-5, or twice the gated model's rounding error, or twice the
    largest of several measured ones, or five times that where the models agree in float64; at most
    1e-4. Each check is yielded when it is done.

    Raises:
        CertificateError: it cannot be run.
    """
    exact: list[bool] = []
    for dtype in answers[0].dtypes if answers else ():
        model = lent(small, dtype).get_submodule(part)
        for answer in answers:
            if dtype in answer.dtypes:
                found = output_of(model, answer.inputs, dtype)
                check = _check(what, answer, found, dtype, part)
                if dtype == torch.float64:
                    exact.append(check.passed)
                elif exact and all(exact) and not check.passed and check.rounding is not None:
                    allowed = min(_TIMES_EXACT * check.rounding, LARGEST)
                    check = replace(check, tolerance=max(check.tolerance, allowed))
                yield check


def compare_in_parts(
    gated: nn.Module, small: nn.Module, paths: Sequence[str], inputs: Sequence[Inputs]
) -> tuple[dict[str, tuple[Answer, ...]], list[Check]]:
    """Compare two models of which only the submodules at ``paths`` differ.

    In float64 they run as a whole: the outputs of those submodules and of the model are compared.
    Then each submodule runs alone on the inputs that it receives in the gated model, since in
    float32 the code between them may amplify rounding (by a threshold, a sort).

    Returns:
        The answers of each submodule of the gated model to its inputs, and the checks.

    Raises:
        CertificateError: one of them cannot be run.
    """
    exact = torch.float64
    first, second = (lent(model, exact) for model in (gated, small))
    checks, received = [], {path: list[Inputs]() for path in paths}
    for given in inputs:
        calls, others = (_calls(model, paths, given, exact) for model in (first, second))
        errors = differences([c.output for c in calls], [c.output for c in others])
        name, outputs = name_of(exact), _outputs(_names(calls), errors)
        checks.append(
            Check(
                "graph",
                name,
                examples_given(given),
                largest(errors),
                TOLERANCE[name],
                inputs=_shapes(given),
                outputs=outputs,
            )
        )
        for call in calls[:-1]:
            received[call.path].append(filled(call.inputs))
    answers = {path: answers_of(gated, of, path) for path, of in received.items()}
    for path in paths:
        checks += compare(answers[path], small, part=path)
    return answers, checks


def answers_alone(
    gated: nn.Module, paths: Sequence[str], given: Inputs
) -> dict[str, tuple[Answer, ...]] | None:
    """Return each submodule's answers when the model runs on this input; None if it cannot.

    None, too, if the output has a nan, such as a deviation over a batch of one.
    """
    try:
        *calls, whole = _calls(lent(gated, torch.float64), paths, given, torch.float64)
    except CertificateError:
        return None
    if holds_nan(whole.output):
        return None
    return {
        path: answers_of(gated, [filled(call.inputs) for call in calls if call.path == path], path)
        for path in paths
    }


def _calls(model: nn.Module, paths: Sequence[str], given: Inputs, dtype: torch.dtype) -> list[Call]:
    """Record every call of the submodules and, last, that of the model."""
    with running_in(dtype):
        return record(model, [*paths, ""], cast(given, dtype, device_of(model)))


def _shapes(inputs: Inputs) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(inputs))


def compare_file(
    what: str,
    answers: Sequence[Answer],
    run: Callable[[list[Tensor]], list[Tensor]],
    part: str = "",
    read: Callable[[Inputs], list[Any]] = tensors_in,
    own: OwnRounding = unknown,
    run_in_float64: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> list[Check]:
    """Compare a file in its runtime with the gated model, or a part of it, in float32.

    ``read`` picks the inputs that the file reads; ``own`` measures the runtime's rounding of each
    output, if that decides. Where it does not explain an error, the file is compared in float64, if
    something runs it there: what is exact there is the runtime's rounding here.
    """
    checks = []
    for answer in answers:
        given = [torch.as_tensor(leaf) for leaf in read(cast(answer.inputs, torch.float32))]
        check = compare_run(what, answer, run(given), part, own)
        is_open = not check.passed and math.isfinite(check.error)
        if is_open and run_in_float64 is not None:
            with suppress(Exception):  # of many classes: what cannot run there stays refused
                exact = _compare_exactly(check, answer.of_tensors(), run_in_float64(given))
                checks.append(exact)
                if exact.passed:
                    check = _of_exact_file(check, answer.of_tensors())
        checks.append(check)
    return checks


def _compare_exactly(check: Check, answer: Answer, found: Sequence[Tensor]) -> Check:
    """Return the comparison of a file in float64 that belongs to one in float32.

    With the answer in float64, where there is one; else within the rounding of that in float32.
    """
    dtype = answer.dtypes[0]
    errors = differences(answer.at(dtype), found, answer.scales)
    outputs, error = _outputs(answer.names, errors), largest(errors)
    exact = replace(check, dtype=name_of(dtype), error=error, outputs=outputs)
    return replace(exact, tolerance=_EXACT, rounding=None) if dtype == torch.float64 else exact


def _of_exact_file(check: Check, answer: Answer) -> Check:
    """Return a comparison in float32 that allows a runtime's rounding of an exact file."""
    error = max([check.error, *(error for _, error in check.outputs)])
    alone = max(answer.rounding, check.rounding or 0.0)
    allowed = max(LARGEST, min(_LARGEST_OWN, _TIMES_OWN * alone))
    return replace(check, error=error, tolerance=max(check.tolerance, allowed))


def compare_run(
    what: str,
    answer: Answer,
    found: Sequence[Tensor],
    part: str = "",
    own: OwnRounding = unknown,
) -> Check:
    """Compare a file's outputs with the gated model's, or a part's, in float32."""
    return _check(what, answer.of_tensors(), found, torch.float32, part, own)


def _check(
    what: str,
    answer: Answer,
    found: Any,
    dtype: torch.dtype,
    part: str = "",
    own: OwnRounding = unknown,
) -> Check:
    errors = differences(answer.at(dtype), found, answer.scales)
    error, allowed, rounding = _judged(answer, errors, dtype, own)
    size, shapes = examples_in(answer.inputs), _shapes(answer.inputs)
    outputs = _outputs(answer.names, errors)
    name = name_of(dtype)
    return Check(what, name, size, error, allowed, part, shapes, outputs, answer.whose, rounding)


def _outputs(names: Sequence[str], errors: Sequence[float]) -> tuple[tuple[str, float], ...]:
    """Return name and error of each output; empty for a single one, whose error is the check's."""
    if len(errors) < 2:
        return ()
    found: dict[str, float] = {}
    seen: Counter[str] = Counter()
    for name, error in zip(names, errors, strict=True):
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = error
    return tuple(found.items())


def _names(calls: Sequence[Call]) -> list[str]:
    """Return the names of these calls' outputs, prefixed by the path of the submodule."""
    return [
        ".".join(filter(None, (call.path, name)))
        for call in calls
        for name in tensor_names(call.output)
    ]


def _judged(
    answer: Answer, errors: Sequence[float], dtype: torch.dtype, own: OwnRounding
) -> tuple[float, float, float | None]:
    """Return the error that decides, the tolerance for it, and the rounding in float32.

    Rounding is measured in a few more runs, until they explain the error, if one run leaves that
    open, and then in the runtime, by ``own``.
    """
    error, usual = largest(errors), TOLERANCE[name_of(dtype)]
    if dtype == torch.float64:
        return error, usual, None
    alone = answer.rounding
    allowed = min(2 * alone, LARGEST) if 2 * alone > usual else usual
    if not allowed < error < math.inf:
        return error, allowed, alone if len(answer.dtypes) > 1 and math.isfinite(alone) else None
    most = answer.roundings
    each = [max(_allowed(rounding), usual) for rounding in most]
    for measured in answer.measured():
        if len(measured) != len(most):
            break
        most = list(map(max, most, measured))
        each = [max(_allowed(rounding), usual) for rounding in most]
        if not any(map(operator.gt, errors, each)):
            break
    if any(map(operator.gt, errors, each)):
        found = own(answer.inputs)
        if len(found.errors) == len(most) == len(answer.scales):
            runtime = [
                e / scale if scale else 0.0
                for e, scale in zip(found.errors, answer.scales, strict=True)
            ]
            runtime = [*map(sum, zip(most, runtime, strict=True))] if found.is_other else runtime
            allowed_there = _of_runtime(found, runtime, answer.scales, most)
            each = [*map(max, each, allowed_there)]
            most = list(map(max, most, runtime))
    judged = zip(errors, each, most, strict=True)
    error, allowed, rounding = max(judged, key=lambda of: of[0] / of[1])
    return error, allowed, rounding if math.isfinite(rounding) else None


def _of_runtime(
    found: RuntimeRounding, roundings: Sequence[float], scales: Sequence[float], own: list[float]
) -> Iterator[float]:
    """Yield the error of each output that a runtime's rounding on the same inputs explains.

    An operator that was translated wrongly is wrong in the uncut network, too: a runtime that
    seems to round far more than PyTorch, whose roundings are ``own``, computes something else.
    """
    for rounding, opened, scale, alone in zip(
        roundings, found.open_scales, scales, own, strict=True
    ):
        units = _UNIT * opened / scale if scale else 0.0
        yield min(TIMES * rounding, max(min(_LARGEST_OWN, _TIMES_OWN * alone), units))


def _allowed(rounding: float) -> float:
    """Return the error that a measured rounding explains."""
    return max(min(TIMES * rounding, LARGEST), min(rounding, _LARGEST_OWN))
