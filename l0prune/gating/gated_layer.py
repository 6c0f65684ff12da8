"""Forwards of torch's own layers that multiply their input where the weight is larger than that.

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
from torch.autograd import Function

from l0prune.capture.compat import convolve, functorch_is_active, standard_convolution
from l0prune.gating.link import Link, acting_link
from l0prune.gating.multiplying import LINK, scale
from l0prune.gating.products import autocast_dtype


class GatedInput(Function):
    """``W(z∘x) + b``, of which the gradient of z is read off that of W.

    With ``∂L/∂W = Σ g (z∘x)ᵀ`` over the batch, where g is the gradient of what comes out,

        ``∂L/∂z_i = Σ_o W_oi · Σ g_o x_i = (Σ_o W_oi · ∂L/∂W_oi) / z_i``,

    so that neither another product of matrices is needed, as for a gradient of the input, nor two
    more passes over the weight, as for one that was multiplied by the gates. Where z is 0 the
    gradient is given as 0, which is right for gates that have no slope there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Shape: x ``(…, inputs)``; z ``(inputs,)``; the result ``(…, outputs)``."""
        gated = x * z
        ctx.save_for_backward(x, gated, z, weight)
        return F.linear(gated, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Shape: grad as the result; what comes back as the arguments."""
        x, gated, z, weight = ctx.saved_tensors
        g = grad.reshape(-1, len(weight))
        bias = g.sum(0) if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():  # the gradient is to be differentiated: its textbook form
            flat = x.reshape(-1, len(z))
            return None, ((g @ weight) * flat).sum(0), g.t() @ (flat * z), bias
        of_weight = g.t() @ gated.reshape(-1, len(z))
        of_z = (weight * of_weight).sum(0)
        return None, torch.where(z == 0, 0, of_z / z), of_weight, bias


# Numbers that a GPU reads and writes in the time that the launches for an input take.
_LAUNCHES = 8_000_000
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
    return F.linear(read, weight, read_by_layer(self, "bias"))


def _convolution(kind: Any, after: int) -> Callable[..., Tensor]:
    """The forward of a convolution over so many dims."""

    @wraps(kind.forward)
    def forward(self: Any, input: Any) -> Tensor:
        read, weight = _gated(self, input, _of_slots(self, input), after)
        return convolve(self, read, weight, read_by_layer(self, "bias"))

    return forward


def read_by_layer(module: nn.Module, name: str) -> Any:
    """Return a layer's weight or bias for torch's operator, maybe cast to what autocast wants."""
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

    ``values`` may multiply the slots of the input, of which ``after`` dims come behind the one that
    the weight contracts.
    """
    if values is None or not _is_free(input, values):
        return input, read_by_layer(module, "weight")
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
