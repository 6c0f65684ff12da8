"""How much of the data is looked at before gates learn: as much as the run can bear."""

from __future__ import annotations

from dataclasses import dataclass

from l0prune.selection.at_once import tried
from l0prune.selection.removal import FORWARDS

# Of the steps in which gates learn: a batch of a score costs about as much as one.
_SCORES, _TRIES = 0.05, 0.025
_FORWARD = 1 / 3  # of a step
_OF_SLOTS = range(10, 101)  # batches
_EXAMPLES = range(8, 33)  # of such a batch: few tell branches apart
_OF_WAYS = range(1, 9)  # batches


@dataclass(frozen=True, slots=True)
class Looks:
    """Of one run.

    Attributes:
        slots: batches from which the score of slots is told.
        branches: batches on which branches are tried.
        few: examples of each of these.
        ways: batches on which the ways to cut at once are compared.
    """

    slots: int
    branches: int
    few: int
    ways: int

    @classmethod
    def of(cls, learning: int, size: int, branches: int) -> Looks:
        """Those of a run.

        Args:
            learning: steps in which gates learn.
            size: of their batches.
            branches: how many there are.
        """
        slots = _within(_OF_SLOTS, _SCORES * learning)
        if not branches:
            return cls(slots, 0, 0, 0)
        bear = _TRIES * learning
        examples = bear * size / (FORWARDS * _FORWARD * branches)
        few = min(size, _within(_EXAMPLES, examples))
        ways = _within(_OF_WAYS, bear / (tried(branches) * _FORWARD))
        return cls(slots, max(1, round(examples / few)), few, ways)

    def steps(self, size: int, branches: int) -> float:
        """What all of them cost together, in steps of training.

        Args:
            size: of its batches.
            branches: how many there are.
        """
        trying = self.branches * self.few / size * branches * FORWARDS
        return self.slots + (trying + tried(branches) * self.ways) * _FORWARD


def _within(limits: range, number: float) -> int:
    """The nearest of these numbers."""
    return min(max(round(number), limits[0]), limits[-1])
