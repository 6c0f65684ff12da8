"""Which slots stay: those of highest score, as many as the limits allow in the exported model.

Expected counts are what gates learn by. What a user gets is the real count of the sliced model,
and widths come in whole slots (or blocks of them): here the last few gates are opened and closed,
in the order of their scores, until that count is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from l0prune.cost.limits import Limit, LimitsLike, limits
from l0prune.cost.model import CostModel, cost_of
from l0prune.errors import UsageError
from l0prune.gating.attaching import gates_of
from l0prune.plan.layout import Both, axes_of
from l0prune.plan.plan import Plan

# A budget counts as used up when less than this share of it is free.
_SLACK = 0.002
# Gates that are passed over, since they do not fit, before what room is left stays empty.
_MISFITS = 100
# What a block of slots has no meaning for: their number is no width of a tensor.
_UNROUNDED = ("head", "group")


def fit(
    model: nn.Module,
    budget: LimitsLike | None = None,
    scores: Tensor | None = None,
    *,
    round_to: int = 1,
    fill: bool = True,
) -> dict[str, int]:
    """Open and close gates, in place, so that an export just meets a budget.

    Gates of lowest score close first; where there is room, those of highest score open again. At
    least one slot of an axis stays. Weights are not touched: the certificate of an export holds,
    but the network computes something else, and wants training.

    Args:
        model: a gated model.
        budget: such as ``"macs=0.5"``, ``{"params": 0.1}``, ``"layer3.*: params=0.3"``, or several;
            None to round widths only.
        scores: what a slot is worth, higher is better; shape ``(plan.size,)``. By default the
            gates' own log α.
        round_to: open slots of an axis come in multiples of this, or all of them. Heads and
            groups, and single inputs of a layer that are cut beside whole maps, are not rounded.
        fill: open more where the budget leaves room; else a network that is smaller may stay so.

    Returns:
        The counts of the exported model, for each limit by its text.

    Raises:
        NotGated: the model carries no gates.
        UsageError: the budget makes no sense, or cannot be met: it says what stands in the way.
    """
    gates = gates_of(model)
    wanted = () if budget is None else limits(budget)
    cost = cost_of(gates.plan)
    check_feasible(cost, wanted, round_to)
    worth = gates.log_alpha.detach() if scores is None else scores
    if worth.shape != (gates.plan.size,) or not bool(torch.isfinite(worth).all()):
        raise UsageError(
            f"scores must be {gates.plan.size} finite numbers in one flat vector, one per gate; "
            f"these have the shape {tuple(worth.shape)}"
        )
    fitting = Fitting(cost, worth, wanted, round_to)
    chosen = fitting.choose(gates.open().cpu(), fill=fill)
    gates.put(chosen)
    return {str(limit): fitting.count(limit, chosen) for limit in wanted}


def check_feasible(cost: CostModel, wanted: Sequence[Limit], round_to: int = 1) -> None:
    """Refuse limits that cannot be met with every gate closed that may be.

    Raises:
        UsageError: names what stands in the way, and why it is pinned.
    """
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise UsageError(f"round_to must be a whole number of at least 1, not {round_to!r}")
    fitting = Fitting(cost, torch.zeros(cost.plan.size), wanted, round_to)
    for limit in wanted:
        least = fitting.least(limit)
        dense, floor = fitting.dense(limit), fitting.count(limit, least)
        if floor > fitting.bound(limit):
            blocks = f", in blocks of {round_to}" if round_to > 1 else ""
            raise UsageError(
                f"the budget {limit} cannot be met: with every gate closed that may be{blocks}, "
                f"{floor:,} of {dense:,} {limit.unit} stay ({floor / max(dense, 1):.1%}). "
                + _in_the_way(cost, limit, least)
            )


class Fitting:
    """The choice of slots for one plan, one score per gate and some limits."""

    def __init__(
        self, cost: CostModel, scores: Tensor, wanted: Sequence[Limit], round_to: int = 1
    ) -> None:
        self._cost, self._plan, self._limits = cost, cost.plan, tuple(wanted)
        self._scores = scores.detach().cpu().double()
        self._through = {limit: limit.axes(cost) for limit in wanted}
        self._blocks = _blocks(cost.plan, round_to)
        self._axis_of = torch.repeat_interleave(
            torch.arange(len(self._plan.axes)), torch.tensor([a.size for a in self._plan.axes])
        )

    def dense(self, limit: Limit) -> int:
        """The dense count of what a limit is about."""
        return self._cost.dense(limit.unit, self._through[limit])

    def bound(self, limit: Limit) -> float:
        """The largest count that a limit allows."""
        return limit.share(self.dense(limit)) * self.dense(limit)

    def count(self, limit: Limit, open_: Tensor) -> int:
        """What an export with these open gates has of what a limit is about."""
        return self._cost.actual(open_, limit.unit, self._through[limit])

    def least(self, limit: Limit) -> Tensor:
        """Open gates when a limit has closed all that it may: one block, the best, an axis."""
        return self._rounded(self._best_of_each() | ~self._counted(limit))

    def choose(self, open_: Tensor, *, fill: bool = True) -> Tensor:
        """Which gates are to be open, starting from those that are; bool, flat, on the CPU.

        Args:
            open_: bool, flat.
            fill: open more where the limits leave room.
        """
        chosen = self._rounded(open_ | self._best_of_each())
        for limit in self._limits:
            chosen = self._close(chosen, limit)
        return self._fill(chosen) if fill and self._limits else chosen

    def _close(self, open_: Tensor, limit: Limit) -> Tensor:
        """Close gates in ascending order of score until the limit is met."""
        may_close = open_ & ~self.least(limit)
        order = self._ascending(may_close)

        def without(number: int) -> Tensor:
            fewer = open_.clone()
            fewer[order[:number]] = False
            return self._rounded(fewer)

        bound = self.bound(limit)
        return without(_first(len(order), lambda n: self.count(limit, without(n)) <= bound))

    def _fill(self, open_: Tensor) -> Tensor:
        """Open gates in descending order of score, but for those that do not fit."""
        counted = torch.stack([self._counted(limit) for limit in self._limits]).any(0)
        order = self._ascending(~open_ & counted).flip(0)
        chosen = open_
        for _ in range(_MISFITS):
            if not len(order) or self._used_up(chosen):
                break
            fitting = self._fitting(chosen, order)
            chosen = self._with(chosen, order[:fitting])
            order = order[fitting + 1 :]
        return chosen

    def _fitting(self, open_: Tensor, order: Tensor) -> int:
        """How many of these gates can be opened, in this order, before a limit is exceeded."""
        return _first(len(order), lambda n: not self._all_met(self._with(open_, order[: n + 1])))

    def _with(self, open_: Tensor, more: Tensor) -> Tensor:
        result = open_.clone()
        result[more] = True
        return self._rounded(result)

    def _all_met(self, open_: Tensor) -> bool:
        return all(self.count(limit, open_) <= self.bound(limit) for limit in self._limits)

    def _used_up(self, open_: Tensor) -> bool:
        """Is there a limit for the whole network that leaves no room to speak of?"""
        return any(
            self.count(limit, open_) > (1 - _SLACK) * self.bound(limit)
            for limit in self._limits
            if limit.glob == "*"
        )

    def _counted(self, limit: Limit) -> Tensor:
        """Gates that take something away of what a limit is about; bool, flat."""
        axes = self._cost.axes_in(limit.unit)
        through = self._through[limit]
        wanted = axes if through is None else axes & through
        return torch.isin(self._axis_of, torch.tensor(sorted(wanted), dtype=torch.int64))

    def _ascending(self, among: Tensor) -> Tensor:
        """Numbers of the gates that are True in ``among``, the one of lowest score first."""
        order = self._scores.argsort(stable=True)
        return order[among[order]]

    def _best_of_each(self) -> Tensor:
        best = torch.zeros(self._plan.size, dtype=torch.bool)
        for axis in self._plan.axes:
            best[axis.start + int(self._scores[axis.slice].argmax())] = True
        return best

    def _rounded(self, open_: Tensor) -> Tensor:
        """The same gates and, up to whole blocks, the best of those that are closed."""
        result = open_.clone()
        for axis, block in zip(self._plan.axes, self._blocks, strict=True):
            if block == 1:
                continue
            mine = open_[axis.slice]
            count = int(mine.sum())
            missing = min(axis.size, block * ceil(count / block)) - count
            if missing:
                closed = self._scores[axis.slice].masked_fill(mine, -torch.inf)
                result[axis.start + closed.topk(missing).indices] = True
        return result


def _blocks(plan: Plan, round_to: int) -> list[int]:
    """For each axis, the number of slots that open and close together."""
    fine = {
        axis
        for site in plan.sites
        if isinstance(site.layout, Both)
        for axis in axes_of(site.layout.fine)
    }
    return [
        1 if axis.kind in _UNROUNDED or number in fine else round_to
        for number, axis in enumerate(plan.axes)
    ]


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """The first of 0 … count-1 for which ``holds``, which goes on holding; count if none.

    It is found in few calls where it is one of the first, as it mostly is.
    """
    low, step = 0, 1
    while low + step <= count and not holds(low + step - 1):
        low, step = low + step, 2 * step
    high = min(count, low + step - 1)
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _in_the_way(cost: CostModel, limit: Limit, least: Tensor, most: int = 3) -> str:
    """Where most of what cannot go is, and why."""
    kept = cost.plan.kept(least).to(torch.float64)
    owners = sorted(cost.by_owner(kept, limit.unit).items(), key=lambda item: -item[1])
    reasons = []
    for owner, count in owners[:most]:
        pins = [p for p in cost.plan.pins if p.where.startswith(f"{owner}.")]
        why = "; ".join(dict.fromkeys(f"{pin.where} is pinned, {pin.reason}" for pin in pins[:2]))
        reasons.append(f"{owner or 'the model'} ({round(count):,}{f': {why}' if why else ''})")
    return (
        f"Most of it is in {', '.join(reasons)}. Give a larger budget, or gate more axes "
        "(include, exclude)."
    )
