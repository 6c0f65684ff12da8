"""When branches learn, and when they are decided, beside widths that learn, too."""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

from l0prune.gating.bank import CLOSED, Gates
from l0prune.objective.budget import Budget
from l0prune.plan.switches import switches_of

_DECIDE = 0.7  # of the steps in which gates learn, under a budget
_WAIT = 0.5  # of the steps in which gates learn, under a price


class Decision:
    """Of which branches stay.

    Under a budget: once they all have to. The amount that is expected of a budget is met by widths
    on average, since they are many. Of a branch with an even chance half of its cost is expected,
    and none or all of it is there: so that is decided while widths can still make up for it. As
    many of the likeliest stay as change least what is expected: if all stayed that have more than
    an even chance, five of which two were expected would go at once, widths that are closed would
    not open again for them, and the network would end up smaller than it may be.

    Where a score has cut at once, the loss told how many branches go, and they stand from the first
    step on. A gate learns slowly what one is worth: many steps see the network with it, or without.

    Under a price branches wait for the widths instead. A branch is worth what its best width is
    worth: at first the price is that of its full width, which none is worth, and all would go.

    Args:
        gates: of a model.
        learning: steps in which they learn.
        decide: the part of these after which a budget's branches are held until all gates stand;
            None for the usual one.
        budget: if there is one; else a price alone.
    """

    def __init__(
        self, gates: Gates, learning: int, decide: float | None, budget: Budget | None
    ) -> None:
        self._gates, self._budget = gates, budget
        self._switches = switches_of(gates.plan).nonzero().flatten()
        self._waiting = self._held = range(0)
        self._kept: Tensor | None = None
        if len(self._switches):
            first = round((_DECIDE if decide is None else decide) * learning)
            self._held = range(first if budget else learning, learning + 1)
            if not budget and len(self._switches) < gates.plan.size:
                self._waiting = range(round(_WAIT * learning))

    @property
    def first(self) -> int:
        """The step from which on branches are held."""
        return self._held.start

    @first.setter
    def first(self, step: int) -> None:
        self._held = range(step, self._held.stop)

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Before each step of an optimizer: where do branches stand that wait?"""
        waits = step in self._waiting
        self._kept = self._gates.log_alpha[self._where()].clone() if waits else None

    @torch.no_grad()
    def hold(self, step: int) -> None:
        """After each step, and before the first: let the gates of branches that wait, or are
        decided, stand. Before the first they stand as they are.

        Those that wait are put back instead of having no gradient: an optimizer that divides by
        the size that gradients had would send them off in leaps after so many of zero.
        """
        if self._kept is not None:
            self._gates.log_alpha[self._where()] = self._kept
        if step not in self._held:
            return
        log_alpha, kind, where = self._gates.log_alpha, self._gates.gate, self._where()
        p = self._gates.open_probability()
        stays = p[where] >= 0.5 if step else self._gates.open()[where]
        if self._budget and step and step == self._held.start:
            stays = likeliest(p, where, self._budget)
        open_, closed = kind.initial(1 - CLOSED), kind.initial(CLOSED)
        log_alpha[where] = torch.where(stays, open_, closed).to(log_alpha.dtype)

    def _where(self) -> Tensor:
        """The switches, on the device of the gates."""
        self._switches = self._switches.to(self._gates.log_alpha.device)
        return self._switches


def likeliest(p: Tensor, switches: Tensor, budget: Budget) -> Tensor:
    """Which switches stay: so many of the likeliest as change least what is expected of a budget.

    Args:
        p: of each gate to be open, flat.
        switches: numbers of some gates.

    Returns:
        bool, of the shape of ``switches``.
    """
    order = p[switches].argsort(descending=True, stable=True)
    before = budget.share_of_targets(p)

    def stay(count: int) -> Tensor:
        return torch.zeros_like(order, dtype=torch.bool).index_fill(0, order[:count], True)

    def change(count: int) -> float:
        decided = p.index_copy(0, switches, stay(count).to(p))
        return float((budget.share_of_targets(decided) / before).max())

    count = bisect_right(range(len(order) + 1), 1.0, key=change)
    around = range(max(count - 1, 0), min(count, len(order)) + 1)
    return stay(min(around, key=lambda n: abs(change(n) - 1)))
