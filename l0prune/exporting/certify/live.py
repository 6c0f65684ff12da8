"""Comparison of the user's model with a copy of it.

Every step of an export works on copies. A class may leave something out of its copies by its
``__getstate__`` or ``__deepcopy__``.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import TorchDispatchMode, pytree
from l0prune.capture.copying import class_forwards, copied
from l0prune.capture.example_inputs import call
from l0prune.capture.model_checks import evaluating, same_draws
from l0prune.capture.provenance import within
from l0prune.capture.sizes import Inputs
from l0prune.capture.undisturbed import undisturbed
from l0prune.errors import UsageError, in_a_line
from l0prune.exporting.certify.difference import difference
from l0prune.progress.stages import stage
from l0prune.running.device import device_of

# Both run the same kernels on the same weights; on a GPU the order of some sums is random.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_OF_HALF = 2e-2
_SHOWN = 3  # attributes in a message
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@stage("comparing the model with a copy of it")
def check_copy(model: nn.Module, example: Inputs) -> str:
    """Compare the outputs of the model and of a copy, in eval mode on the model's device.

    The model is unchanged afterwards: modes, buffers, attributes, random state.

    Returns:
        Why they were not compared; empty if they were.

    Raises:
        UsageError: they differ; the message names attributes that the copy lacks, if any.
    """
    twin = copied(model, {id(parameter): parameter for parameter in model.parameters()})
    outputs, failures = [], []
    for name, each in (("The model itself", model), ("A copy of the model", twin)):
        try:
            outputs.append(_output(each, example))
        except Exception as error:  # the model may raise any class
            failures.append(
                f"{name} could not be run on its example, so that the two were not compared: "
                f"{in_a_line(error)}."
            )
    if len(failures) == 2:
        return ""  # such as an operator missing on this machine, which later passes report
    if failures:
        return failures[0]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    apart = difference(*outputs)
    is_apart = apart > _ROUNDING.get(dtype, _OF_HALF)  # not so where both give nan
    if not is_apart or _is_random(model, example, outputs[0]):
        return ""
    names = _lost(model, twin)
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    lost = f"The copy has lost: {'; '.join(names[:_SHOWN] + more)}. " if names else ""
    raise UsageError(
        f"A copy of the model computes something else than the model itself: {apart:.1e} of the "
        "output's scale on the example. Copies are what is cut and compared, so nothing was "
        f"exported. {lost}The usual cause is a "
        "__getstate__, __deepcopy__ or __reduce__ of its own that leaves a setting out, or a "
        "forward that reads a global. Let the copy keep it, or make it a plain attribute."
    )


def _output(model: nn.Module, example: Inputs) -> Any:
    """Return the model's output in its dtypes, on its device."""
    device = device_of(model)

    def placed(leaf: Any) -> Any:
        return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    given = pytree.tree_map(placed, example)
    with same_draws(model, seed=0), _untouched(model):
        output = call(model, given)
        return pytree.tree_map_only(Tensor, torch.clone, output)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Context in which the model runs uncompiled in eval mode; restores its state on exit."""
    kept = _BeforeWrites([*model.parameters(), *model.buffers()])
    stance = torch.compiler.set_stance("force_eager")
    try:
        with undisturbed(model), class_forwards(model), evaluating(model), stance, kept:
            yield
    finally:
        with torch.no_grad():
            for tensor, value in kept.values:
                tensor.copy_(value)


class _BeforeWrites(TorchDispatchMode):
    """Context that copies tensors before an operator writes into their memory."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._waiting: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            self._waiting[_memory(tensor)].append(tensor.detach())
        self.values: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator."""
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    found = self._waiting.pop(_memory(leaf), ())
                    self.values += [(tensor, tensor.clone()) for tensor in found]
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Return the storage address of a tensor, equal for views; 0 without a plain storage."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _is_random(model: nn.Module, example: Inputs, output: Any) -> bool:
    """Check whether a second run of the model gives another output, by random numbers of its own.
    Then this comparison proves nothing; the certificate's is with the same draws.
    """
    return difference(output, _output(model, example)) > _ROUNDING[torch.float32]


def _lost(model: nn.Module, twin: nn.Module) -> list[str]:
    """Describe module attributes that the copy lacks or has with other values."""
    others, found = dict(twin.named_modules(remove_duplicate=False)), []
    for path, module in model.named_modules(remove_duplicate=False):
        other = vars(others[path]) if path in others else {}
        for name, value in vars(module).items():
            if name not in other:
                found.append(f"{within(path, name)}, which it has not")
            elif isinstance(value, _PLAIN) and value != other[name]:
                found.append(f"{within(path, name)}, {other[name]!r} in place of {value!r}")
    return found
