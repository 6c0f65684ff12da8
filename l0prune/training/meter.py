"""Mean losses of an epoch, and an eye on them that seldom has to wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from l0prune.running.processes import ALONE, World

LOOK_EVERY = 50  # steps


class NotFinite(Exception):
    """A loss is nan or inf.

    Attributes:
        ago: how many steps after it the last one was.
        value: the loss.
    """

    def __init__(self, ago: int, value: float) -> None:
        super().__init__(ago, value)
        self.ago = ago
        self.value = value


class Meter:
    """Adds up the losses of an epoch; their values are fetched at every ``look`` only.

    What counts is the mean over all processes, which look after the same steps.

    Attributes:
        loss: sum of the task losses looked at.
        penalty: sum of the penalties.
        count: number of steps.
    """

    def __init__(
        self,
        *,
        forgiving: bool,
        loss: float = 0.0,
        penalty: float = 0.0,
        count: int = 0,
        world: World = ALONE,
    ) -> None:
        self.loss, self.penalty, self.count = loss, penalty, count
        self._world = world
        # With fp16 the loss scaler leaves out steps that overflow, until its scale fits.
        self._forgiving = forgiving
        self._losses: list[Tensor] = []
        self._penalties: list[Tensor] = []

    def add(self, loss: Tensor, penalty: Tensor | None) -> None:
        """One more step."""
        self._losses.append(loss.detach())
        if penalty is not None:
            self._penalties.append(penalty.detach())

    @property
    def is_due(self) -> bool:
        """Is it time for a look?"""
        return len(self._losses) >= LOOK_EVERY

    def look(self) -> float | None:
        """The mean loss since the last look; None if there was no step.

        Raises:
            NotFinite: a loss was nan or inf.
        """
        if not self._losses:
            return None
        losses: list[float] = self._world.mean_(torch.stack(self._losses)).tolist()
        penalties: list[float] = torch.stack(self._penalties).tolist() if self._penalties else []
        self._losses, self._penalties = [], []
        good = [value for value in losses if math.isfinite(value)]
        if len(good) < len(losses) and not (self._forgiving and good):
            first = next(n for n, value in enumerate(losses) if not math.isfinite(value))
            raise NotFinite(len(losses) - 1 - first, losses[first])
        # One after another, so that the sum does not depend on when we look.
        for value in good:
            self.loss += value
        for value in penalties:
            self.penalty += value
        self.count += len(good)
        return sum(good) / len(good)

    def means(self) -> tuple[float, float]:
        """Mean task loss and mean penalty of the steps looked at."""
        count = max(self.count, 1)
        return self.loss / count, self.penalty / count
