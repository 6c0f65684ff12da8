"""Global sparse momentum on the slots of a network (Ding et al. 2019).

From "Global Sparse Momentum SGD for Pruning Very Deep Neural Networks". At each step only the most
salient slots get the loss' gradient, as many as the budget keeps: with the saliency Σ|w·∂L/∂w| of a
slot's group and B = 1 for the weights all of whose slots are among them, else 0, SGD with momentum
β, rate α and weight decay η does

    Z ← β·Z + η·w + B ⊙ ∂L/∂w,    w ← w − α·Z.

All others have nothing but momentum of weight decay, and go to zero. They are chosen anew at each
step, so that a slot may recover.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError
from l0prune.features.penalties.groups import GroupPenalty
from l0prune.training.settings import Settings

_EVERY = 10  # steps between two looks at how many slots the budget keeps
MOMENTUM = 0.98
_DECAY = 10.0  # ln of the factor by which weights that only decay shrink in a run
_MOST = 0.01  # largest η at which salient weights do not decay away in short runs


def default_decay(rate: float, momentum: float, steps: int) -> float:
    """Return η at which weights that only decay shrink by e^−10 in ``steps`` steps; at most 0.01.

    A step of decay under momentum is α·η/(1 − β) in the long run.
    """
    return min(_MOST, _DECAY * (1 - momentum) / (max(rate, 1e-12) * max(steps, 1)))


def gsm_defaults(settings: Settings, steps: int) -> Settings:
    """Return settings with the paper's momentum and a default weight decay, unless given.

    Slots that the loss reaches until the end of the budget's ramp have the rest of the ``steps``
    to go to zero.
    """
    given = settings.model_fields_set
    momentum = settings.momentum if "momentum" in given else MOMENTUM
    decay = default_decay(settings.lr, momentum, round(steps * (1 - settings.ramp)))
    decay = settings.weight_decay if "weight_decay" in given else decay
    return settings.model_copy(update={"momentum": momentum, "weight_decay": decay})


def check_decay(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError if no group has weight decay, without which no weight goes to zero."""
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
        """Mask the gradients of passive slots' weights, before the optimizer's step."""
        if number >= self._phases.learning:
            return
        check_decay(optimizers)
        assert self._budget is not None
        groups = self._now()
        salient = groups.sums(lambda part: saliency(part.parameter))
        learns = groups.usable & self._gates.open()
        if number % _EVERY == 0 or not self._count:
            # _excessive ranks relative to the usual size of an axis, saliency is compared globally.
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
        """Close passive slots of negligible weights, after the optimizer's step ``number``."""
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
        """Return the state of any penalty on slots, and the number of active slots."""
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        super().load_state_dict(state)
        self._count = state["count"]


def saliency(weight: nn.Parameter) -> Tensor:
    """Return |w·∂L/∂w| of each element, float32."""
    value = weight.detach()
    if weight.grad is None:
        return torch.zeros_like(value.abs(), dtype=torch.float32)
    return (value * weight.grad.conj()).abs().float()
