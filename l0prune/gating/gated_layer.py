"""Forwards of torch's own layers that multiply what is read where the weight is larger than that.

A gate on what a layer reads may multiply the columns of its weight or the slots of its input: it is
the same function. Behind a flattened map, and where maps have shrunk to a few pixels, the weight is
many times as large as a batch of inputs, and gradients pass it three times over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.gating.link import acting_link
from l0prune.gating.scale import scale

_Forward = Callable[[nn.Module, Any], Tensor]


def forward_of(original: type[nn.Module]) -> _Forward | None:
    """The forward of a gated layer; None for a class that computes in a way of its own."""
    if original.forward is nn.Linear.forward:
        return _multiplying(nn.Linear.forward, _linear, after=0)
    for kind, after in ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)):
        own = getattr(original, "_conv_forward", None)
        if original.forward is kind.forward and own is kind._conv_forward:
            return _multiplying(kind.forward, _convolution, after)
    return None


def _multiplying(plain: Any, layer: Callable[..., Tensor], after: int) -> _Forward:
    """``plain``, but for inputs that are smaller than the weight.

    Args:
        plain: the layer's forward, which reads the gated weight.
        layer: from the module, an input and the weight to the output.
        after: dims of the input after the one that the weight contracts.
    """

    def forward(self: nn.Module, input: Any) -> Tensor:
        weight = self._parameters["weight"]
        if weight is not None and _is_smaller(input, weight):
            values = _of_input(self, input, weight)
            if values is not None:
                return layer(self, scale(input, values, input.dim() - 1 - after), weight)
        result: Tensor = plain(self, input)
        return result

    return forward


def _is_smaller(input: Any, weight: Tensor) -> bool:
    """Is it an ordinary tensor, of the weight's precision, and smaller than the weight?"""
    return (
        type(input) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and not torch.compiler.is_compiling()  # a compiler merges the product into what is near
        and input.dtype == weight.dtype
        and input.numel() < weight.numel()
        and not torch._C._are_functorch_transforms_active()
    )


def _of_input(module: nn.Module, input: Tensor, weight: Tensor) -> Tensor | None:
    """What multiplies the slots of the input; None where that is not all that the gates do."""
    link = acting_link(module, "weight", weight)
    if link is None or "weight" in link.scales or getattr(module, "groups", 1) != 1:
        return None
    (multiplier, dim), *more = link.sites["weight"]
    if more or dim != 1:
        return None
    link.gates.refresh()
    values = multiplier.values
    assert values is not None
    # Where nobody asks for the input's gradient, it would cost more than the weight's product.
    return values if input.requires_grad or not values.requires_grad else None


def _linear(module: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input, weight, module.bias)


def _convolution(module: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = module._conv_forward(input, weight, module.bias)  # type: ignore[operator]
    return result
