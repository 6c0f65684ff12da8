"""The phases of a run: λ warms up, the network is pruned, the weights settle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from l0prune.errors import UsageError
from l0prune.progress.stages import Events
from l0prune.training.history import History

Phase = Literal["warm-up", "prune", "settle"]

# Defaults, as parts of all steps.
WARMUP = 0.05
SETTLE = 0.3


@dataclass(frozen=True, slots=True)
class Phases:
    """Lengths of the phases, in steps.

    Attributes:
        total: all steps of the run.
        warmup: steps of warm-up, in which λ rises from 0 in a straight line.
        settle: steps at the end in which the gates are fixed at their eval values and λ is off.
    """

    total: int
    warmup: int
    settle: int

    @staticmethod
    def plan(
        total: int, warmup: int | None = None, settle: int | None = None, least: int = 0
    ) -> Phases:
        """Phases of a run of ``total`` steps; ``warmup`` and ``settle`` None for the default part.

        ``least`` is the smallest number of settling steps, whatever ``settle`` is.
        """
        rise = round(total * WARMUP) if warmup is None else warmup
        rest = max(least, round(total * SETTLE) if settle is None else settle)
        if min(rise, rest) < 0 or rise + rest >= total:
            raise UsageError(
                f"warm-up ({rise} steps) and settling ({rest}) leave nothing of a run of {total} "
                "steps to prune in; give more epochs or steps, or shorten these phases"
            )
        return Phases(total, rise, rest)

    @staticmethod
    def settling(epochs: int, steps_per_epoch: int) -> Phases:
        """Phases of a run whose gates are fixed from the first step on."""
        total = epochs * steps_per_epoch
        return Phases(total, 0, total)

    @staticmethod
    def dense(epochs: int, steps_per_epoch: int) -> Phases:
        """Phases of a run without gates: a single one."""
        return Phases(epochs * steps_per_epoch, 0, 0)

    @property
    def learning(self) -> int:
        """Steps in which the gates learn."""
        return self.total - self.settle

    def at(self, step: int) -> Phase:
        """The phase of step number ``step``, counted from 0."""
        if step < self.warmup:
            return "warm-up"
        return "settle" if step >= self.total - self.settle else "prune"

    def factor(self, step: int) -> float:
        """Return the factor of λ at this step."""
        if self.at(step) == "settle":
            return 0.0
        return min(1.0, step / self.warmup) if self.warmup else 1.0

    def learned(self, step: int) -> float:
        """Return the fraction of the gates' learning steps that are done before this step."""
        return min(1.0, step / self.learning) if self.learning else 1.0

    def begins_to_settle(self, step: int) -> bool:
        """Return whether the gates are fixed from this step on; if nothing settles, at the end."""
        return step == self.total - self.settle


_epochs: Events[History] = Events("epochs")
watched, done = _epochs.watched, _epochs.emit
