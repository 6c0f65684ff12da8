"""Global sparse momentum (Ding et al. 2019, "Global Sparse Momentum SGD for Pruning Very Deep
Neural Networks"), on the slots of a network.

At each step the loss reaches the most salient slots alone, as many as the budget keeps: with the
saliency Σ|w·∂L/∂w| of a slot's group and B = 1 for the weights all of whose slots are among them,
else 0, SGD with momentum β, rate α and weight decay η does

    Z ← β·Z + η·w + B ⊙ ∂L/∂w,    w ← w − α·Z.

All others have nothing but momentum of weight decay, and go to zero. Which they are is decided anew
at each step, so that one may come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError
from l0prune.training.group_penalty import GroupPenalty
from l0prune.training.settings import Settings

_EVERY = 10  # steps between two looks at how many slots the budget keeps
MOMENTUM = 0.98
_DECAY = 10.0  # ln of the factor by which what the loss never reaches shrinks in a run
_MOST = 0.01  # η beyond which the loss does not hold its own weights in short runs


def default_decay(rate: float, momentum: float, steps: int) -> float:
    """η at which weights that only decay shrink by e^−10 within so many steps; at most 0.01.

    A step of decay under momentum is α·η/(1 − β) in the long run.
    """
    return min(_MOST, _DECAY * (1 - momentum) / (max(rate, 1e-12) * max(steps, 1)))


def with_defaults(settings: Settings, steps: int) -> Settings:
    """Settings with the momentum of the paper and a decay, unless given.

    What the loss reaches as long as the budget's target sinks has the rest of so many steps to go
    to zero.
    """
    given = settings.model_fields_set
    momentum = settings.momentum if "momentum" in given else MOMENTUM
    decay = default_decay(settings.lr, momentum, round(steps * (1 - settings.ramp)))
    decay = settings.weight_decay if "weight_decay" in given else decay
    return settings.model_copy(update={"momentum": momentum, "weight_decay": decay})


def check_decay(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError where nothing decays, so that nothing would go to zero."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if groups and not any(group.get("weight_decay") for group in groups):
        raise UsageError(
            "gsm needs weight decay: what the loss does not reach goes to zero by nothing else. "
            "Give the optimizer some, as SGD(pruner.param_groups(lr=0.03, weight_decay=5e-4), "
            "momentum=0.98), or weight_decay to finetune"
        )


class SparseMomentum(GroupPenalty):
    """Global sparse momentum of one run, on slots under a budget."""

    _count = 0  # of active slots
    _active: Tensor | None = None

    @torch.no_grad()
    def before(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Before the optimizer's step: leave a gradient to the weights of active slots alone."""
        if number >= self._phases.learning:
            return
        check_decay(optimizers)
        assert self._budget is not None
        groups = self._now()
        salient = groups.sums(lambda part: saliency(part.parameter))
        learns = groups.usable & self._gates.open()
        if number % _EVERY == 0 or not self._count:
            # Sizes are ranked beside what is usual of an axis, saliency over the whole network.
            passive = self._excessive(salient * self._scale, learns)
            self._count = int((learns & ~passive).sum())
        ranked = torch.where(learns, salient, -1.0)
        most = ranked.topk(min(self._count, int(learns.sum()))).indices
        passive = learns & ~self._last(salient)
        passive[most] = False
        self._active = ~passive
        for part in groups.parts:
            if (gradient := part.parameter.grad) is not None:
                gradient.mul_(groups.at(part, 1 - passive.float()).to(gradient.dtype))

    @torch.no_grad()
    def step(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """After the optimizer's step of this number: close passive slots that have become faint."""
        if number >= self._phases.learning:
            return
        assert self._budget is not None
        self._budget.done += 1  # so that its target sinks
        t = self._sizes()
        faint = self.kind.shrunk(t, t, self._scale) <= 0
        faint &= self._groups.usable & self._gates.open() & ~self._last(t)
        if self._active is not None:
            faint &= ~self._active
        if bool(faint.any()):
            self._close(self._excessive(t, faint), shrink=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of any penalty on slots, and the number of active slots."""
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        super().load_state_dict(state)
        self._count = state["count"]


def saliency(weight: nn.Parameter) -> Tensor:
    """|w·∂L/∂w| of each element, float32."""
    value = weight.detach()
    if weight.grad is None:
        return torch.zeros_like(value.abs(), dtype=torch.float32)
    return (value * weight.grad.conj()).abs().float()
