"""How strongly budgets pull at the gates, beside the loss.

An excess is a share, a loss has units of its own, and either may be a thousand times the steeper
for the gates. What budgets weigh is told from the two gradients, now and then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from l0prune.gating.kinds.base import Gate

_EVERY = 10  # steps
_KEPT = 0.9  # of what was found before
_ROUNDING = 1e-4  # of the budgets' gradient, below which nothing is known of the loss'


class Balance:
    """The norm of the gradient of all excess over that of the loss, for log α.

    Attributes:
        weight: it, a scalar: the geometric mean over the looks, late ones counting most.
    """

    def __init__(self) -> None:
        self.weight = torch.tensor(1.0)
        self._pulls: list[Tensor] = []

    def look(self, done: int, p: Tensor, excess: Tensor) -> None:
        """Every few steps, ``done`` so far: note the gradients of what each budget is exceeded by.

        Args:
            done: steps done.
            p: open probabilities, on the way from log α to ``excess``.
            excess: of each budget, shape ``(k,)``.
        """
        if done % _EVERY == 0 and excess.requires_grad:
            self._pulls = [
                torch.autograd.grad(each, p, retain_graph=True)[0] for each in excess.unbind()
            ]

    def weigh(
        self, done: int, gate: Gate, log_alpha: Tensor, gradient: Tensor, multipliers: Tensor
    ) -> None:
        """After ``look``: the weight, by the gradient for log α of loss and budgets together.

        Nothing waits for the device. Where one of the two is next to nothing,
        the weight stays.
        """
        if not self._pulls:
            return
        at = log_alpha.detach().clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(gate.open_probability(at).sum(), at)
        pulls = [pull.to(slope.dtype) * slope for pull in self._pulls]
        stacked = torch.stack(pulls)
        priced = multipliers.to(slope.dtype) @ stacked
        of_loss = (gradient - priced).norm()
        found = stacked.sum(0).norm() / of_loss
        weight = self.weight.to(found)
        mean = found if done == 0 else weight**_KEPT * found ** (1 - _KEPT)
        is_told = (found > 0) & (of_loss > _ROUNDING * priced.norm())
        self.weight = torch.where(is_told, mean, weight)
        self._pulls = []
