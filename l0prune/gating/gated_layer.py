"""Forwards of torch's own layers that multiply what is read where the weight is larger than that.

A gate on what a layer reads may multiply the columns of its weight or the slots of its input: it is
the same function. Behind a flattened map, and where maps have shrunk to a few pixels, the weight is
many times as large as a batch of inputs, and forward and backward pass it seven times over. Before
the first layer nobody asks for the input's gradient, and ``GatedInput`` goes without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.capture.compat import convolve, functorch_is_active, standard_convolution
from l0prune.gating.current import LINK
from l0prune.gating.gated_input import GatedInput
from l0prune.gating.link import acting_link
from l0prune.gating.scale import scale

_CONVOLUTIONS = ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3))


def forward_of(original: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The forward of a gated layer; None for a class that computes in a way of its own."""
    if original.forward is nn.Linear.forward:
        return _linear
    for kind, after in _CONVOLUTIONS:
        if standard_convolution(original, kind):
            return _convolution(kind, after)
    return None


@wraps(nn.Linear.forward)
def _linear(self: nn.Linear, input: Any) -> Tensor:
    values = _of_slots(self, input)
    if values is not None and not _is_free(input, values) and _is_carried(self, values):
        result: Tensor = GatedInput.apply(input, values, self._parameters["weight"], self.bias)
        return result
    read, weight = _gated(self, input, values, 0)
    return F.linear(read, weight, self.bias)


def _convolution(kind: Any, after: int) -> Callable[..., Tensor]:
    """The forward of a convolution over so many dims."""

    @wraps(kind.forward)
    def forward(self: Any, input: Any) -> Tensor:
        read, weight = _gated(self, input, _of_slots(self, input), after)
        return convolve(self, read, weight)

    return forward


def _gated(module: Any, input: Any, values: Tensor | None, after: int) -> tuple[Any, Any]:
    """Return the layer's input and weight, one of them multiplied by the gates.

    Args:
        module: the layer.
        input: of its forward.
        values: what may multiply the slots of the input.
        after: dims of the input after the one that the weight contracts.
    """
    if values is None or not _is_free(input, values):
        return input, module.weight
    return scale(input, values, input.dim() - 1 - after), module._parameters["weight"]


def _is_free(input: Tensor, values: Tensor) -> bool:
    """Return whether multiplying the input asks for no gradient that is not computed anyway."""
    return input.requires_grad or not values.requires_grad


def _of_slots(module: nn.Module, input: Any) -> Tensor | None:
    """Return the multipliers of the slots that a layer reads.

    None where that is not all that its gates do, or to multiply its weight costs less.
    """
    weight = module._parameters.get("weight")
    if not _is_smaller(input, weight):
        return None
    link = acting_link(module, "weight", weight)
    if link is None or "weight" in link.scales or getattr(module, "groups", 1) != 1:
        return None
    (multiplier, dim), *more = link.sites["weight"]
    if more or dim != 1:
        return None
    link.gates.refresh()
    return multiplier.values


def _is_smaller(input: Any, weight: Any) -> bool:
    """Return whether multiplying the input costs less than multiplying the weight.

    Only where a backward pass may follow. So what a model computes without gradients does not
    depend, in the last bit, on the size of a batch.
    """
    return (
        type(input) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and input.numel() < weight.numel()
        and input.dtype == weight.dtype
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()  # a compiler merges the product into what is near
        and not functorch_is_active()
    )


def _is_carried(module: nn.Module, values: Tensor) -> bool:
    """Return whether the gradient of these gates follows from the weight's."""
    gates, weight = module.__dict__[LINK].gates, module._parameters["weight"]
    assert weight is not None
    device = weight.device
    return (
        bool(gates.is_flat_at_zero)
        and weight.requires_grad
        and weight.dtype == values.dtype
        and device == values.device
        and torch.amp.is_autocast_available(device.type)  # else torch cannot tell
        and not torch.is_autocast_enabled(device.type)
    )
