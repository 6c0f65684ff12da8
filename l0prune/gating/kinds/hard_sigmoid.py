"""The sigmoid that gates are made of, stretched and clamped, in one operation of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from l0prune.capture.compat import functorch_is_active
from l0prune.cost.first_order import first_order


def hard_sigmoid(
    log_alpha: Tensor,
    logistic: Tensor | None,
    rate: float,
    gamma: float = 0.0,
    zeta: float = 1.0,
) -> Tensor:
    """``clamp(s·(ζ−γ) + γ, 0, 1)`` with ``s = σ((log α + logistic)·rate)``; by default s itself.

    Its backward pass may run any number of times over, but cannot be differentiated; within
    transforms of torch.func (``vmap``, ``grad``) it is made of torch's own operations, and can.

    Shape: log_alpha, logistic and result ``(gates,)``.
    """
    if functorch_is_active():
        logits = log_alpha if logistic is None else log_alpha + logistic
        return torch.rsub((logits * rate).sigmoid(), gamma, alpha=gamma - zeta).clamp(0, 1)
    if not (log_alpha.requires_grad and torch.is_grad_enabled()):
        return _stretched(_sigmoid(log_alpha, logistic, rate), gamma, zeta)
    z: Tensor = _HardSigmoid.apply(log_alpha, logistic, rate, gamma, zeta)
    return z


def _sigmoid(log_alpha: Tensor, logistic: Tensor | None, rate: float) -> Tensor:
    logits = log_alpha if logistic is None else log_alpha + logistic
    return (logits * rate).sigmoid_()


def _stretched(s: Tensor, gamma: float, zeta: float) -> Tensor:
    return torch.rsub(s, gamma, alpha=gamma - zeta).clamp_(0, 1)


class _HardSigmoid(Function):
    """One node of the graph instead of seven.

    It keeps s as an attribute, not as a saved tensor: autograd frees those after the first
    backward pass, while every segment of a checkpointed model makes a pass of its own through
    the one sample.
    """

    @staticmethod
    def forward(
        ctx: Any, log_alpha: Tensor, logistic: Tensor | None, rate: float, gamma: float, zeta: float
    ) -> Tensor:
        ctx.s = _sigmoid(log_alpha, logistic, rate)
        ctx.rate, ctx.gamma, ctx.zeta = rate, gamma, zeta
        return _stretched(ctx.s, gamma, zeta)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stretch = ctx.zeta - ctx.gamma
        # s inside these bounds is z strictly inside (0, 1); outside, the clamp has no slope.
        lower, upper = -ctx.gamma / stretch, (1 - ctx.gamma) / stretch
        inside = torch.ops.aten.hardtanh_backward(grad, ctx.s, lower, upper)
        slope = torch.ops.aten.sigmoid_backward(inside, ctx.s)
        return slope * (ctx.rate * stretch), None, None, None, None
