"""When branches learn, and when they are decided, beside widths that learn, too."""

from __future__ import annotations

import torch

from l0prune.gating.bank import CLOSED, Gates
from l0prune.plan.switches import switches_of

_WAIT = 0.5  # of the steps in which gates learn, under a price


class Decision:
    """Of which branches stay.

    Under a budget: once they all have to. The amount that is expected of a budget is met by widths
    on average, since they are many. Of a branch with an even chance half of its cost is expected,
    and none or all of it is there: so that is decided while widths can still make up for it.

    Under a price branches wait for the widths instead. A branch is worth what its best width is
    worth: at first the price is that of its full width, which none is worth, and all would go.

    Args:
        gates: of a model.
        learning: steps in which they learn.
        decide: the part of these after which a budget's branches are held until all gates stand.
        is_budget: whether there is one; else a price alone.
    """

    def __init__(self, gates: Gates, learning: int, decide: float, *, is_budget: bool) -> None:
        self._gates = gates
        self._switches = switches_of(gates.plan).nonzero().flatten()
        self._waiting = self._held = range(0)
        self._kept: torch.Tensor | None = None
        if len(self._switches):
            self._held = range(round(decide * learning) if is_budget else learning, learning + 1)
            if not is_budget and len(self._switches) < gates.plan.size:
                self._waiting = range(round(_WAIT * learning))

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Before each step of an optimizer: where do branches stand that wait?"""
        waits = step in self._waiting
        self._kept = self._gates.log_alpha[self._where()].clone() if waits else None

    @torch.no_grad()
    def hold(self, step: int) -> None:
        """After each step: let the gates of branches that wait, or are decided, stand.

        Those that wait are put back instead of having no gradient: an optimizer that divides by
        the size that gradients had would send them off in leaps after so many of zero.
        """
        if self._kept is not None:
            self._gates.log_alpha[self._where()] = self._kept
        if step not in self._held:
            return
        log_alpha, kind, where = self._gates.log_alpha, self._gates.gate, self._where()
        stays = self._gates.open_probability()[where] >= 0.5
        open_, closed = kind.initial(1 - CLOSED), kind.initial(CLOSED)
        log_alpha[where] = torch.where(stays, open_, closed).to(log_alpha.dtype)

    def _where(self) -> torch.Tensor:
        """The switches, on the device of the gates."""
        self._switches = self._switches.to(self._gates.log_alpha.device)
        return self._switches
