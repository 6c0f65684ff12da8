"""When branches are decided: before the widths, which then learn what the budget leaves them."""

from __future__ import annotations

import torch

from l0prune.gating.bank import CLOSED, Gates
from l0prune.plan.switches import switches_of


class Decision:
    """Of which branches stay, once they all have to.

    The amount that is expected of a budget is met by widths on average, since they are many. Of a
    branch with an even chance half of its cost is expected, and none or all of it is there: so that
    is decided while widths can still make up for it.

    Args:
        gates: of a model.
        steps: after which they are held: from where they are decided until all gates stand.
    """

    def __init__(self, gates: Gates, steps: range) -> None:
        self._gates, self._steps = gates, steps
        self._switches = switches_of(gates.plan).nonzero().flatten()

    @torch.no_grad()
    def hold(self, step: int) -> None:
        """After each step: where branches are decided, let their gates stand."""
        if step not in self._steps or not len(self._switches):
            return
        log_alpha, kind = self._gates.log_alpha, self._gates.gate
        where = self._switches = self._switches.to(log_alpha.device)
        stays = self._gates.open_probability()[where] >= 0.5
        open_, closed = kind.initial(1 - CLOSED), kind.initial(CLOSED)
        log_alpha[where] = torch.where(stays, open_, closed).to(log_alpha.dtype)
