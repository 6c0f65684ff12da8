"""A linear layer with gates on an input that needs no gradient of its own: a model's first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


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
