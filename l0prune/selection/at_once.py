"""One-shot part of a run: part of the way to the limits, with the number of branches of least loss.

A score tells slots from each other, and another branches; how many branches are worth as much as
which widths, neither says. So the same part is cut in several ways, from widths alone to branches
alone, and what the loss is then decides. Half of the way tells best: where scores cut all of it the
loss is far above chance, and does not say from where a network learns best.
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
from l0prune.selection.subject import Subject

_TRIED = 12  # ways beside widths alone, at most: each costs a forward


@dataclass(frozen=True)
class AtOnce:
    """A part of the way to some limits, and what goes first.

    Attributes:
        wanted: the limits.
        blocks: for each axis, how many slots close together.
        scores: of slots and of branches, shape ``(plan.size,)``.
        part: of the way, in factors: half of it to 0.36 is to 0.6.
    """

    wanted: Sequence[Bound]
    blocks: Sequence[int]
    scores: Tensor
    part: float = 0.5

    def left(self, subject: Subject) -> tuple[Tensor, bool]:
        """The gates that are open at its end, and whether a loss told how many branches are.

        Ways from which widths alone can go all of the way come before others.

        Args:
            subject: the gated network, and a batch or more of data.

        Returns:
            bool, flat, on the CPU; and False where there is no loss in eval mode, so that widths
            alone have gone, or where branches still have to go for the rest of the way.

        Raises:
            UsageError: nothing is as small as that.
        """
        plan, open_ = subject.plan, subject.gates.open().cpu()
        ways = list(self.ways(plan, open_))
        if not ways:
            return self.in_widths(plan, open_ & ~switches_of(plan)), False
        whole = replace(self, part=1.0)
        last = [way for way in ways if whole.is_possible(plan, way)]
        among = last or ways
        if len(among) == 1:
            return among[0], bool(last)
        losses = subject.losses(among)
        if losses is None:
            return among[0], False
        return among[int(losses.nan_to_num(torch.inf).argmin())], bool(last)

    def ways(self, plan: Plan, open_: Tensor) -> Iterator[Tensor]:
        """Open gates with ever more branches gone, those of lowest score first, and so fewer slots.

        Args:
            plan: of the network.
            open_: the gates that are open now; bool, flat, on the CPU.
        """
        switches = (switches_of(plan) & open_).nonzero().flatten()
        order = switches[self.scores[switches].argsort(stable=True)]
        for count in range(0, len(order) + 1, _apart(len(order))):
            start = open_.index_fill(0, order[:count], False)
            try:
                found = self.in_widths(plan, start)
            except UsageError:  # more of the branches have to go
                continue
            yield found
            if torch.equal(found, without_idle(plan, start)):  # no slot closes any more
                return

    def in_widths(self, plan: Plan, start: Tensor) -> Tensor:
        """The gates that are open at its end where no more branches go than at the start.

        Args:
            plan: of the network.
            start: the gates that are open now; bool, flat, on the CPU.

        Raises:
            UsageError: no choice of slots is as small as that.
        """
        movable = Movable.of(~switches_of(plan), start)
        fitting = Fitting(plan, self.scores, self.wanted, self.blocks, movable)
        for bound in self.wanted:
            fitting.most[bound] = bound.dense * bound.share**self.part
        return without_idle(plan, fitting.choose(start, fill=False).open_)

    def is_possible(self, plan: Plan, start: Tensor) -> bool:
        """Return whether widths alone can go this part of the way."""
        try:
            self.in_widths(plan, start)
        except UsageError:
            return False
        return True


def tried(branches: int) -> int:
    """Return the largest number of cuts tried on a network with so many branches."""
    return branches // _apart(branches) + 1


def _apart(branches: int) -> int:
    """Return the number of branches between one trial and the next."""
    return max(1, ceil(branches / _TRIED))
