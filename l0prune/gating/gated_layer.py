"""Forwards of torch's own layers that multiply what is read where the weight is larger than that.

A gate on what a layer reads may multiply the columns of its weight or the slots of its input: it is
the same function. Behind a flattened map, and where maps have shrunk to a few pixels, the weight is
many times as large as a batch of inputs, and gradients pass it three times over.
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

    @wraps(plain)
    def forward(self: nn.Module, input: Any) -> Tensor:
        weight = self._parameters["weight"]
        if weight is not None and _is_better(input, weight):
            values = _of_input(self, weight)
            if values is not None:
                return layer(self, scale(input, values, input.dim() - 1 - after), weight)
        result: Tensor = plain(self, input)
        return result

    return forward


def _is_better(input: Any, weight: Tensor) -> bool:
    """Does multiplying the input cost less than multiplying the weight?

    Only where a backward pass follows that computes the input's gradient anyway. So what a model
    computes without gradients does not depend, in the last bit, on the size of a batch.
    """
    return (
        torch.is_grad_enabled()
        and type(input) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and not torch.compiler.is_compiling()  # a compiler merges the product into what is near
        and input.requires_grad
        and input.numel() < weight.numel()
        and input.dtype == weight.dtype
        and not torch._C._are_functorch_transforms_active()
    )


def _of_input(module: nn.Module, weight: Tensor) -> Tensor | None:
    """What multiplies the slots that are read; None where that is not all that the gates do."""
    link = acting_link(module, "weight", weight)
    if link is None or "weight" in link.scales or getattr(module, "groups", 1) != 1:
        return None
    (multiplier, dim), *more = link.sites["weight"]
    if more or dim != 1:
        return None
    link.gates.refresh()
    return multiplier.values


def _linear(module: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = F.linear(input, weight, module.bias)  # type: ignore[arg-type]
    return result


def _convolution(module: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = module._conv_forward(input, weight, module.bias)  # type: ignore[operator]
    return result
