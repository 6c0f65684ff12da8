"""Averages of a model that the user keeps (EMA, SWA): they follow what is decided of its gates."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from l0prune.capture.compat import version_of
from l0prune.gating.bank import Gates, alive, asked_of
from l0prune.objective.budget import Budget

_ROUNDING = 8.0  # eps of the values, below which a change says nothing


class Followers:
    """Copies of a model that are averages of it.

    An average of log α is no decision: gates that closed late are still open in it, so that it
    would export above the budget that the model itself meets. Whether a copy is an average is seen
    from how its gates change: all by the same part, from 0 to 1, of the way to the model's own. A
    copy that is trained, or that takes the model's state as it is, is left alone.

    Other copies whose gates change, and the model itself, into which an average may be loaded, are
    registered with the budget: an export of them warns where they exceed it.

    Args:
        gates: of the model that is trained.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._seen: WeakKeyDictionary[Gates, tuple[int | None, Tensor]] = WeakKeyDictionary()
        self._averages: WeakSet[Gates] = WeakSet()
        self._changing: WeakSet[Gates] = WeakSet()
        asked_of[gates] = None

    @torch.no_grad()
    def look(self) -> None:
        """Find copies whose gates have changed, and averages among them; before each step."""
        now = self._gates.log_alpha.detach()
        for bank in alive():
            mine = bank.log_alpha.detach()
            if bank is self._gates or bank in self._averages or mine.shape != now.shape:
                continue
            if bank.kept is not None:  # a copy of a part
                continue
            version = version_of(mine)
            before = self._seen.get(bank)
            if before is not None and before[0] == version:
                continue
            if before is not None and _is_average(before[1].to(mine), mine, now.to(mine)):
                self._averages.add(bank)
            elif before is not None:
                self._changing.add(bank)
            self._seen[bank] = version, mine.clone()

    def follow(self, budget: Budget | None) -> None:
        """Fix the gates of averages as those of the model are from here on.

        Args:
            budget: of the run, which the gates meet.
        """
        open_ = self._gates.open()
        for bank in self._averages:
            bank.gate = self._gates.gate
            bank.put(open_)
        if budget is not None:
            with_runs = {*asked_of} - {self._gates}
            for bank in {self._gates, *self._averages, *self._changing} - with_runs:
                asked_of[bank] = partial(_excess, budget)


def _excess(budget: Budget, open_: Tensor) -> str:
    """Say which budgets an export with these open gates exceeds; empty if none."""
    exceeded = [bound for bound in budget.bounds if bound.actual(open_) > bound.most]
    shares = (f"{bound.actual_share(open_):.0%} for {bound.limit}" for bound in exceeded)
    return ", ".join(shares)


def _is_average(before: Tensor, after: Tensor, model: Tensor) -> bool:
    """Return whether all numbers moved towards the model by the same part of the way."""
    way, step = (model - before).double(), (after - before).double()
    rounding = _ROUNDING * torch.finfo(after.dtype).eps * float(after.double().norm())
    if float(step.norm()) <= rounding:
        return False
    part = float(way @ step / (way @ way).clamp_min(1e-300))
    return 0 < part < 1 - 1e-3 and float((step - part * way).norm()) <= rounding
