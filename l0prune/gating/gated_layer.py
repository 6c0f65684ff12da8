"""Forwards of torch's layers that gate the input instead of the weight, if the input is smaller.

Multiplying the columns of a layer's weight or the slots of its input by gates is the same function.
After a flatten, and where maps have shrunk to a few pixels, the weight is many times as large as a
batch of inputs, and forward and backward traverse it seven times. If the layer's input needs no
gradient, as in the first layer, ``GatedInput`` does not compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from l0prune.capture.compat import convolve, functorch_is_active, standard_convolution
from l0prune.gating.link import Link, acting_link
from l0prune.gating.multiplying import LINK, scale
from l0prune.gating.products import autocast_dtype


class GatedInput(Function):
    """``W(z∘x) + b``, where the gradient of z is computed from that of W.

    With ``∂L/∂W = Σ g (z∘x)ᵀ`` over the batch, where g is the gradient of the output,

        ``∂L/∂z_i = Σ_o W_oi · Σ g_o x_i = (Σ_o W_oi · ∂L/∂W_oi) / z_i``,

    so that neither another matrix product is needed, as for a gradient of the input, nor two more
    passes over the weight, as for a gated weight. Where z is 0 the gradient is set to 0, which is
    right for gates that have no slope there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Shape: x ``(…, inputs)``; z ``(inputs,)``; the result ``(…, outputs)``."""
        gated = x * z
        ctx.save_for_backward(x, gated, z, weight)
        return F.linear(gated, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Shape: grad as the result of ``forward``; results as its arguments."""
        x, gated, z, weight = ctx.saved_tensors
        g = grad.reshape(-1, len(weight))
        bias = g.sum(0) if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():  # double backward: differentiable form
            flat = x.reshape(-1, len(z))
            return None, ((g @ weight) * flat).sum(0), g.t() @ (flat * z), bias
        of_weight = g.t() @ gated.reshape(-1, len(z))
        of_z = (weight * of_weight).sum(0)
        return None, torch.where(z == 0, 0, of_z / z), of_weight, bias


# Elements that a GPU reads and writes while it launches the kernels that gate an input.
_LAUNCHES = 8_000_000
_CONVOLUTIONS = ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3))


def forward_of(original: type[nn.Module]) -> Callable[..., Tensor] | None:
    """Return the forward of a gated layer; None for a class whose forward is not torch's."""
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
    return F.linear(read, weight, read_by_layer(self, "bias"))


def _convolution(kind: Any, after: int) -> Callable[..., Tensor]:
    """Return the forward of a convolution over ``after`` dims."""

    @wraps(kind.forward)
    def forward(self: Any, input: Any) -> Tensor:
        read, weight = _gated(self, input, _of_slots(self, input), after)
        return convolve(self, read, weight, read_by_layer(self, "bias"))

    return forward


def read_by_layer(module: nn.Module, name: str) -> Any:
    """Return a layer's weight or bias for torch's operator, possibly in autocast's dtype."""
    link: Link | None = module.__dict__.get(LINK)
    if (
        link is None
        or name not in link.sites
        or not link.gates.products.is_on
        or link.quantizes(name)
    ):
        return getattr(module, name)
    stored = module._parameters.get(name)
    if stored is None or not acting_link(module, name, stored):
        return stored
    cast = None if stored.dtype == torch.float64 else autocast_dtype(stored.device)
    return link.product(name, stored, cast or stored.dtype)


def _gated(module: Any, input: Any, values: Tensor | None, after: int) -> tuple[Any, Any]:
    """Return the layer's input and weight, one of them multiplied by the gates.

    ``values`` are multipliers for the input's slots, or None; ``after`` dims of the input follow
    the contracted one.
    """
    if values is None or not _is_free(input, values):
        return input, read_by_layer(module, "weight")
    return scale(input, values, input.dim() - 1 - after), module._parameters["weight"]


def _is_free(input: Tensor, values: Tensor) -> bool:
    """Return whether multiplying the input needs no additional gradient of the input."""
    return input.requires_grad or not values.requires_grad


def _of_slots(module: nn.Module, input: Any) -> Tensor | None:
    """Return the multipliers of the slots that a layer reads.

    None if its gates act on other dims, too, or if multiplying the weight costs less.
    """
    weight = module._parameters.get("weight")
    if not _is_smaller(input, weight):
        return None
    link = acting_link(module, "weight", weight)
    if link is None or link.quantizes("weight") or getattr(module, "groups", 1) != 1:
        return None
    if "weight" in link.scales or "weight" not in link.sites:
        return None
    if link.gates.products.is_on and weight.numel() - input.numel() < _LAUNCHES:  # type: ignore[union-attr]
        return None
    (multiplier, dim), *more = link.sites["weight"]
    if more or dim != 1:
        return None
    link.gates.refresh()
    return multiplier.values


def _is_smaller(input: Any, weight: Any) -> bool:
    """Return whether multiplying the input costs less than multiplying the weight.

    False without gradients, so that inference does not depend, in the last bit, on the batch size.
    """
    return (
        type(input) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and input.numel() < weight.numel()
        and input.dtype == weight.dtype
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()  # a compiler fuses the product
        and not functorch_is_active()
    )


def _is_carried(module: nn.Module, values: Tensor) -> bool:
    """Return whether ``GatedInput`` can compute the gates' gradient from the weight's."""
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
