"""Partial cut towards a budget, by scores, where the loss decides how many branches go.

One score ranks slots, and another ranks branches; neither compares branches with widths. So
``OneShot`` cuts the same part of the way in several ways, from widths alone to branches alone, and
the loss decides. Half of the way tells best: after a whole cut by scores the loss is far above
chance, and does not predict from which cut a network learns best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.plan.limits import Bound
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switches_of, without_idle
from l0prune.selection.fitting import Fitting, Movable
from l0prune.selection.score_input import ScoreInput

_TRIED = 12  # ways beside widths alone, at most: each costs a forward


@dataclass(frozen=True)
class OneShot:
    """A one-shot cut, by scores, of a part of the way to some limits.

    Attributes:
        wanted: the limits.
        blocks: for each axis, how many slots close together.
        scores: of slots and of branches, shape ``(plan.size,)``.
        part: of the way, as an exponent of the share: half of the way to 0.36 is 0.6.
    """

    wanted: Sequence[Bound]
    blocks: Sequence[int]
    scores: Tensor
    part: float = 0.5

    def choose(self, of: ScoreInput) -> tuple[Tensor, bool]:
        """Choose the open gates, and say whether a loss settled how many branches stay.

        Ways from which widths alone can go all of the way come before others, and those that take
        no more than all of the way asks for (or the least more) before those that do.

        Returns:
            bool, flat, on the CPU; and False where there is no loss in eval mode, so that widths
            alone have gone, or where branches still have to go for the rest of the way.

        Raises:
            UsageError: no choice of slots is as small as that.
        """
        plan, open_ = of.plan, of.gates.open().cpu()
        ways = list(self.candidates(plan, open_))
        if not ways:
            return self.cut_widths(plan, open_ & ~switches_of(plan)), False
        whole = replace(self, part=1.0)
        last = [way for way in ways if whole.is_possible(plan, way)]
        among = last or ways
        if self.part < 1:
            most = max(map(self._left, among))
            among = [way for way in among if self._left(way) == most]
        if len(among) == 1:
            return among[0], bool(last)
        losses = of.losses(among)
        if losses is None:
            return among[0], False
        return among[int(losses.nan_to_num(torch.inf).argmin())], bool(last)

    def candidates(self, plan: Plan, open_: Tensor) -> Iterator[Tensor]:
        """Yield open gates with ever more branches removed, those of lowest score first."""
        switches = (switches_of(plan) & open_).nonzero().flatten()
        order = switches[self.scores[switches].argsort(stable=True)]
        for count in range(0, len(order) + 1, _apart(len(order))):
            start = open_.index_fill(0, order[:count], False)
            try:
                found = self.cut_widths(plan, start)
            except UsageError:  # more of the branches have to go
                continue
            yield found
            if torch.equal(found, without_idle(plan, start)):  # no slot closes any more
                return

    def cut_widths(self, plan: Plan, start: Tensor) -> Tensor:
        """Cut widths alone, this part of the way, from the gates that are open at the start.

        Raises:
            UsageError: no choice of slots is as small as that.
        """
        movable = Movable.of(~switches_of(plan), start)
        fitting = Fitting(plan, self.scores, self.wanted, self.blocks, movable)
        for bound in self.wanted:
            fitting.most[bound] = bound.dense * bound.share**self.part
        return without_idle(plan, fitting.choose(start, fill=False).open_)

    def _left(self, open_: Tensor) -> float:
        """Return the least ratio of the amount of these open gates to a limit, at most 1."""
        return min(1.0, *(b.actual_share(open_) / b.share for b in self.wanted))

    def is_possible(self, plan: Plan, start: Tensor) -> bool:
        """Return whether widths alone can go this part of the way."""
        try:
            self.cut_widths(plan, start)
        except UsageError:
            return False
        return True


def most_trials(branches: int) -> int:
    """Return the largest number of cuts tried on a network with so many branches."""
    return branches // _apart(branches) + 1


def _apart(branches: int) -> int:  # from one trial to the next
    return max(1, ceil(branches / _TRIED))
