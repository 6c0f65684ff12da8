"""Backward passes that can be differentiated no further, without a cost to those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, entered only where someone builds a graph of the gradient.

    Elsewhere autograd is off already, and switching it off once more would cost a small model
    more than the pass itself.
    """
    guarded = once_differentiable(backward)

    def apply(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return apply
