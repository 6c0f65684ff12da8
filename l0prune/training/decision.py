"""When branches learn, and when they are decided, beside widths that learn, too.

When a run trains the network that its gates leave, and when it cannot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from l0prune.errors import L0pruneError
from l0prune.gating.bank import CLOSED, Gates
from l0prune.plan.switches import switches_of
from l0prune.training.budget import Budget
from l0prune.training.compaction import Compaction
from l0prune.training.gate_settings import Compact

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


class Shrinking:
    """Cuts a run's model when its setting says so; where that fails, says why, and never again.

    Args:
        compaction: of the model.
        when: see ``GateSettings.compact``.
        say: what is called with the text of a warning.
    """

    def __init__(self, compaction: Compaction, when: Compact, say: Callable[[str], None]) -> None:
        self._compaction, self._when, self._say = compaction, when, say
        self._has_failed = False

    def look_ahead(self, hindrance: str) -> None:
        """Before the first step: is it known that the network cannot be cut?"""
        if hindrance and self._when != "never":
            self._keep_whole(hindrance)

    def to_what_stands(self) -> None:
        """From the step on at which all gates stand."""
        if self._when != "never":
            self._attempt(self._compaction.begin)

    def to_what_is_open(self, *, begins: bool = False) -> None:
        """While gates learn: what was closed for long enough goes, or before they begin to."""
        if self._when == "auto":
            self._attempt(partial(self._compaction.look, begins=begins))

    def state_dict(self) -> dict[str, Any]:
        """How the model is cut, and whether that has failed."""
        return {**self._compaction.state_dict(), "failed": self._has_failed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be cut as a run was that goes on."""
        self._has_failed = state["failed"]
        if self._has_failed:
            self.stop()
        if self._when == "never":
            state = {**state, "kept": None}
        self._attempt(partial(self._compaction.load_state_dict, state))

    def stop(self) -> None:
        """Cut nothing from here on."""
        self._when = "never"

    def _attempt(self, cut: Callable[[], None]) -> None:
        try:
            cut()
        except L0pruneError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """The model cannot be cut after all: nothing is, from here on, also after a stop."""
        self._has_failed = True
        self._keep_whole(reason)

    def _keep_whole(self, reason: str) -> None:
        self.stop()
        self._say(f"compact: the network keeps its size while it trains: {reason}")
