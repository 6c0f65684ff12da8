"""Forwards of torch's own layers that multiply what is read where the weight is larger than that.

A gate on what a layer reads may multiply the columns of its weight or the slots of its input: it is
the same function. Behind a flattened map, and where maps have shrunk to a few pixels, the weight is
many times as large as a batch of inputs, and forward and backward pass it seven times over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.gating.link import acting_link
from l0prune.gating.scale import scale

_CONVOLUTIONS = ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3))


def forward_of(original: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The forward of a gated layer; None for a class that computes in a way of its own."""
    if original.forward is nn.Linear.forward:
        return _linear
    for kind, after in _CONVOLUTIONS:
        own = getattr(original, "_conv_forward", None)
        if original.forward is kind.forward and own is kind._conv_forward:
            return _convolution(kind, after)
    return None


@wraps(nn.Linear.forward)
def _linear(self: nn.Linear, input: Any) -> Tensor:
    read, weight = _gated(self, input, 0)
    return F.linear(read, weight, self.bias)


def _convolution(kind: Any, after: int) -> Callable[..., Tensor]:
    """The forward of a convolution over so many dims."""

    @wraps(kind.forward)
    def forward(self: Any, input: Any) -> Tensor:
        read, weight = _gated(self, input, after)
        result: Tensor = self._conv_forward(read, weight, self.bias)
        return result

    return forward


def _gated(module: Any, input: Any, after: int) -> tuple[Any, Tensor]:
    """What the layer reads and its weight, of which one is multiplied by the gates.

    Args:
        module: the layer.
        input: of its forward.
        after: dims of the input after the one that the weight contracts.
    """
    weight = module._parameters.get("weight")
    if _is_better(input, weight):
        values = _of_slots(module, weight)
        if values is not None:
            return scale(input, values, input.dim() - 1 - after), weight
    return input, module.weight


def _is_better(input: Any, weight: Any) -> bool:
    """Does multiplying the input cost less than multiplying the weight?

    Only where a backward pass follows that computes the input's gradient anyway. So what a model
    computes without gradients does not depend, in the last bit, on the size of a batch.
    """
    return (
        type(input) is Tensor
        and input.requires_grad
        and type(weight) in (nn.Parameter, Tensor)
        and input.numel() < weight.numel()
        and input.dtype == weight.dtype
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()  # a compiler merges the product into what is near
        and not torch._C._are_functorch_transforms_active()
    )


def _of_slots(module: nn.Module, weight: Tensor) -> Tensor | None:
    """What multiplies the slots that are read; None where that is not all that the gates do."""
    link = acting_link(module, "weight", weight)
    if link is None or "weight" in link.scales or getattr(module, "groups", 1) != 1:
        return None
    (multiplier, dim), *more = link.sites["weight"]
    if more or dim != 1:
        return None
    link.gates.refresh()
    return multiplier.values
