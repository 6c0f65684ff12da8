"""Strength of the budgets' gradients at the gates, relative to the loss.

An excess is a share, a loss has units of its own, and either may be a thousand times the steeper
for the gates. What budgets weigh is told from the two gradients, now and then.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EVERY = 10  # steps
_KEPT = 0.9  # of what was found before
_ROUNDING = 1e-4  # of the budgets' gradient, below which nothing is known of the loss


class Balance:
    """The norm of the gradient of all excess over that of the loss, for log α.

    Attributes:
        weight: it, a scalar: the geometric mean over the looks, late ones counting most.
    """

    def __init__(self) -> None:
        self.weight = torch.tensor(1.0)
        self._pulls: Tensor | None = None

    def look(self, done: int, log_alpha: Tensor, excess: Tensor) -> None:
        """Every few steps, ``done`` so far: note the gradients of what each budget is exceeded by.

        Args:
            done: steps done.
            log_alpha: of the gates.
            excess: of each budget, shape ``(k,)``.
        """
        if done % _EVERY == 0 and excess.requires_grad:
            pulls = (
                torch.autograd.grad(each, log_alpha, retain_graph=True)[0]
                for each in excess.unbind()
            )
            self._pulls = torch.stack([*pulls])

    def weigh(self, done: int, gradient: Tensor, multipliers: Tensor) -> None:
        """After ``look``: the weight, by the gradient for log α of loss and budgets together.

        Nothing waits for the device. Where one of the two is next to nothing, the weight stays.
        """
        if self._pulls is None:
            return
        priced = multipliers.to(self._pulls.dtype) @ self._pulls
        of_loss = (gradient - priced).norm()
        found = self._pulls.sum(0).norm() / of_loss
        weight = self.weight.to(found)
        mean = found if done == 0 else weight**_KEPT * found ** (1 - _KEPT)
        is_told = (found > 0) & (of_loss > _ROUNDING * priced.norm())
        self.weight = torch.where(is_told, mean, weight)
        self._pulls = None
