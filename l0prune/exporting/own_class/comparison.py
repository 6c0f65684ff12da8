"""Comparison of a resized module of the user's class: in eval mode, in training, with a cache.

Training mode is compared with the same random numbers (``SteadyDraws``). A decoder is also compared
on the last token alone with a cache: a skipped layer writes nothing into the cache.
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.capture.compat import TorchDispatchMode, pytree
from l0prune.capture.example_inputs import call, record, tensors_in
from l0prune.capture.model_checks import same_draws
from l0prune.capture.provenance import is_within, within
from l0prune.capture.sizes import Inputs
from l0prune.capture.symbolic import raised_at
from l0prune.capture.threads import muted
from l0prune.errors import CertificateError, in_a_line
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.certificate import Check, compare
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import InOneDtype, cast, lent
from l0prune.files.cut_layers import SKIPPED
from l0prune.gating.bank import Gates
from l0prune.running.device import device_of

# Sums have another order with a cache than without one.
EXACT = 1e-6
_ROUNDING = {torch.float64: EXACT, torch.float32: 1e-3}
CACHES = ("cache", "past_key_values")  # the name depends on the version of transformers
_MASK = "attention_mask"
TOKENS = ("decoder_input_ids", "input_ids")  # the first of them that a forward takes
OTHER_STEPS = "with a cache it goes on as another model would"


@dataclass(frozen=True)
class CachedStep:
    """Output for an example's last token with a cache of the tokens before it.

    Attributes:
        inputs: the example.
        output: of the reference.
        dtype: in which it ran.
    """

    inputs: Inputs
    output: Tensor
    dtype: torch.dtype

    @classmethod
    def of(
        cls, module: nn.Module, inputs: Inputs, dtype: torch.dtype = torch.float64
    ) -> CachedStep | None:
        """Run a module with a cache; None if it keeps no cache or its output is not finite."""
        with suppress(Exception):
            output = _stepped(module, inputs, dtype)
            return cls(inputs, output, dtype) if bool(output.isfinite().all()) else None
        return None

    def fault_of(self, module: nn.Module) -> str:
        """Return why a module's step with a cache differs; empty if it does not."""
        try:
            found = _stepped(module, self.inputs, self.dtype)
        except Exception as error:
            return f"with a cache it does not go on: {in_a_line(error)}"
        return "" if difference(self.output, found) <= _ROUNDING[self.dtype] else OTHER_STEPS


def _stepped(module: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Return the output for the last token, computed with a cache of the tokens before it.

    For decoder-only models the first token of the first example is masked like padding: then the
    model needs the number of cached tokens.

    Raises:
        Exception: the module keeps no cache, or does not take such inputs.
    """
    signature = inspect.signature(module.forward)
    cache = next((name for name in CACHES if name in signature.parameters), "")
    if not cache:
        raise TypeError("this model keeps no cache")
    args, kwargs = cast(inputs, dtype, device_of(module))
    given = dict(zip(signature.parameters, args, strict=False)) | kwargs
    name = next(each for each in TOKENS if each in signature.parameters)
    tokens = given.pop(name)
    first, last = given | {name: tokens[:, :-1]}, given | {name: tokens[:, -1:]}
    if name == TOKENS[1] and _MASK in signature.parameters:
        mask = given.get(_MASK, torch.ones_like(tokens)).clone()
        mask[0, 0] = 0
        first[_MASK], last[_MASK] = mask[:, :-1], mask
    model, asked = lent(module, dtype).eval(), {"use_cache": True, "return_dict": True}
    with muted(), torch.no_grad(), InOneDtype(dtype):
        before = model(**(first | asked))
        after = model(**(last | asked | {cache: before[cache]}))
    result = after[0]
    assert isinstance(result, Tensor)
    return result


_ATEN = torch.ops.aten


class SteadyDraws(TorchDispatchMode):
    """Context in which every kind of dropout keeps all values and other random draws are recorded.

    Two models that compute the same with any dropout mask do so here if their other draws have
    equal shapes: then torch draws the same numbers for both, from the same seed.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        super().__init__()
        self._module, self._seed = module, seed
        self._drawn: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __enter__(self) -> SteadyDraws:
        self._others = _state_of_others()
        self._fork = same_draws(self._module, self._seed)
        self._fork.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_known = _state_of_others() == self._others
        self._fork.__exit__(*error)

    def is_like(self, other: SteadyDraws) -> bool:
        """Return whether both contexts, once left, drew the same random numbers."""
        return self._is_known and other._is_known and self._drawn == other._drawn

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _ATEN.bernoulli_.float:
            return args[0].fill_(1)
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:  # type: ignore[attr-defined]
            tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self._drawn.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return result


def _state_of_others() -> bytes:
    """Return the state of Python's and NumPy's generators, which a forward may draw from, too."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


SOMETHING_ELSE = "its forward computes something else at these sizes"


@dataclass(frozen=True)
class Comparison:
    """Verdict on a resized module as a replacement of the original.

    Attributes:
        reason: why it is wrong in eval mode, for the user; empty if it is right.
        training: why it is wrong in training mode; empty if it is right, or not compared.
        untried: why training mode could not be tried; empty else.
        checks: the comparisons that it passed.
    """

    reason: str = ""
    training: str = ""
    untried: str = ""
    checks: tuple[Check, ...] = ()


def compare_class(module: nn.Module, answers: Sequence[Answer]) -> Comparison:
    """Compare the resized module's outputs with the expected ones.

    They differ if its forward has hard-coded sizes, or derives one size from another (as
    ``nn.MultiheadAttention`` does).
    """
    checks = []
    try:
        for check in compare(answers, module, "class"):
            if not check.passed:
                return Comparison(SOMETHING_ELSE)
            checks.append(check)
    except CertificateError as error:  # its forward raised: that is the reason
        cause = error.__cause__ or error
        line = raised_at(cause)
        at = f" at {line}" if line else ""
        return Comparison(f"its forward does not allow these sizes{at}: {in_a_line(cause)}")
    return Comparison(checks=tuple(checks))


def first_difference(module: nn.Module, new: nn.Module, inputs: Inputs) -> str:
    """Return the path of the first submodule whose output differs after the cut, in eval mode.

    Only outputs with unchanged shapes, which are thus not cut, are compared. Empty if none differs,
    or if the models cannot be run.
    """
    given = cast(inputs, torch.float64, device_of(module))
    paths = [path for path, _ in new.named_modules() if path]
    with suppress(Exception), muted(), InOneDtype(torch.float64):
        both = (record(lent(each, torch.float64), paths, given) for each in (module, new))
        for old, found in zip(*both, strict=True):
            shapes = [[x.shape for x in tensors_in(each.output)] for each in (old, found)]
            if (
                shapes[0] == shapes[1]
                and difference(old.output, found.output) > _ROUNDING[torch.float64]
            ):
                return str(old.path)
    return ""


@dataclass(frozen=True)
class InTraining:
    """Results of a module in training mode on one input, gates at their eval values.

    Attributes:
        inputs: the input.
        output: the tensors that it returns.
        left: by path, tensors other than parameters that the forward changed or stored in modules:
            buffers, and attributes such as an auxiliary loss.
        draws: record of the random numbers drawn.
        dtype: in which it ran.
    """

    inputs: Inputs
    output: list[Tensor]
    left: dict[str, Tensor]
    draws: SteadyDraws
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, inputs: Inputs, dtype: torch.dtype) -> InTraining:
        """Run a copy of the module in training mode and record its results."""
        again = lent(module, dtype).train()
        for bank in again.modules():
            if isinstance(bank, Gates):
                bank.fixed = True
        given = cast(inputs, dtype, device_of(module))
        before = {name: (tensor, tensor.clone()) for name, tensor in _held(again)}
        in_exact, steady = InOneDtype(dtype), SteadyDraws(module, seed=0)
        with muted(), torch.no_grad(), in_exact, steady as draws:
            output = call(again, given)
        left = {}
        for name, tensor in _held(again):
            was, value = before.get(name, (None, tensor))
            # by its value: a BatchNorm's statistics change without autograd's seeing a write
            if tensor is not was or not torch.equal(tensor, value):
                left[name] = tensor.detach()
        return cls(inputs, tensors_in(output), left, draws, dtype)


@dataclass(frozen=True)
class Expected:
    """Expected results of a resized module in training mode.

    Attributes:
        of: results of the module before the cut; None if it could not be run.
        untried: why it could not; empty else.
        is_gated: whether it carries gates, without which a smaller one computes something else.
    """

    of: InTraining | None
    untried: str = ""
    is_gated: bool = False

    @classmethod
    def by(cls, module: nn.Module, inputs: Inputs, dtype: torch.dtype = torch.float64) -> Expected:
        """Run the module before the cut, which may fail for lack of inputs, such as targets."""
        try:
            return cls(InTraining.of(module, inputs, dtype), is_gated=has_gates(module))
        except Exception as error:
            return cls(None, in_a_line(error))

    def fault_of(self, module: nn.Module, allowed: float | None = None) -> str:
        """Return why the resized module is wrong in training; empty if right, or not comparable.

        Errors of up to ``allowed`` are rounding; by default what the dtype rounds.
        """
        if self.of is None:
            return ""
        try:
            found = InTraining.of(module, self.of.inputs, self.of.dtype)
        except Exception as error:
            return f"its forward does not allow these sizes: {in_a_line(error)}"
        if [leaf.shape for leaf in found.output] != [leaf.shape for leaf in self.of.output]:
            return "its output has another shape at these sizes"
        if not self.is_gated or not found.draws.is_like(self.of.draws):
            return ""
        rounding = _ROUNDING[self.of.dtype] if allowed is None else allowed
        if difference(self.of.output, found.output) > rounding:
            return "it computes something else there at these sizes"
        for name, tensor in self.of.left.items():
            other = found.left.get(name, tensor)
            if other.shape == tensor.shape and difference(tensor, other) > rounding:
                return f"{name} becomes something else there at these sizes"
        return ""


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the modules' tensors other than parameters, by path, without skipped modules."""
    gone: list[str] = []
    for path, each in module.named_modules():
        if isinstance(each, SKIPPED):
            gone.append(path)
        if any(is_within(path, skipped) for skipped in gone):
            continue
        for name, value in {**vars(each), **each._buffers}.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for number, tensor in enumerate(tensors_in(value)):
                    if not isinstance(tensor, nn.Parameter):  # an LSTM has a list of these
                        yield within(path, name) + (f"[{number}]" if number else ""), tensor


def has_gates(module: nn.Module) -> bool:
    """Check whether the module carries gates."""
    return any(isinstance(each, Gates) for each in module.modules())


def note_on(comparisons: Mapping[str, Comparison], unused: Mapping[str, int]) -> str:
    """Return the note for the user on the exported module; empty if there is nothing to say.

    Args:
        comparisons: verdict on the user's class for each captured part, by path.
        unused: sizes of the parameters that eval mode does not use and that were thus not cut, by
            name.
    """
    lines = [
        f"{path or 'The module'} is the captured graph, not of its own class: {comparison.reason}."
        for path, comparison in comparisons.items()
        if comparison.reason
    ]
    modules = dict.fromkeys(name.partition(".")[0] for name, size in unused.items() if size)
    if modules and not lines:
        lines.append(
            f"{', '.join(modules)}: not used in eval mode, and therefore not cut. Of its "
            f"parameters, {sum(unused.values()):,} are in the module and not counted."
        )
    lines += [
        f"{path or 'The module'} is not to be trained on: {comparison.training}."
        for path, comparison in comparisons.items()
        if comparison.training
    ]
    return "\n".join(lines)
