"""Choice of the slots of highest score that just meet some bounds, in whole blocks.

An amount need not fall with every gate that closes: a layer's time is a step function of its
width, and a width that fits the runtime's blocks may be faster than a smaller one. So each choice
that is returned was checked as a whole, and meets every bound. A block is some slots of an axis
that open and close together, for widths in whole multiples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, lcm
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from l0prune.doors import is_provided, provided
from l0prune.errors import OutOfReach
from l0prune.plan.branch import KIND
from l0prune.plan.limits import Bound
from l0prune.plan.measures import Measure
from l0prune.plan.numbers import check_whole
from l0prune.plan.plan import Plan
from l0prune.plan.targets import TARGET, check_target
from l0prune.plan.width_times import LINEAR, WidthTimes, have_widths
from l0prune.running.processes import run_on_first

# A budget counts as used up when less than this share of it is free.
_SLACK = 0.002
# Gates that are skipped, since they do not fit, before filling ends.
_MISFITS = 100
# How often each bound may close further gates after the others did.
_TURNS = 5
# Multiples that are tried for an axis that may be faster where it is wider, largest first.
_WHOLE_BLOCKS = (64, 32, 16, 8)
# How many numbers of gates are tried where an amount goes up and down.
_PROBES = 64


class SlotChoice(NamedTuple):
    """A choice of slots.

    Attributes:
        open_: the open gates; bool, flat, on the CPU.
        asked: those of them that are open for their scores.
    """

    open_: Tensor
    asked: Tensor

    @property
    def filling(self) -> Tensor:
        """Slots that are open only because slots come in whole blocks."""
        return self.open_ & ~self.asked


class Movable(NamedTuple):
    """The gates that may open and close; all others keep their state.

    Attributes:
        gates: mask of these gates; bool, flat, on the CPU.
        held: the other gates that are open.
    """

    gates: Tensor
    held: Tensor

    @classmethod
    def of(cls, gates: Tensor, open_: Tensor) -> Movable:
        """Return these gates as movable, with the open ones of all others held."""
        return cls(gates, open_ & ~gates)


class Fitting:
    """The choice of slots for one plan, one score per gate and some bounds.

    Attributes:
        most: by bound, the largest amount that is allowed; to begin with that of the bound.

    Args:
        scores: what each gate is worth, shape ``(plan.size,)``.
        blocks: for each axis, how many slots open and close together; 1 where it is not movable.
        movable: None for all gates.
    """

    def __init__(
        self,
        plan: Plan,
        scores: Tensor,
        wanted: Sequence[Bound],
        blocks: Sequence[int],
        movable: Movable | None = None,
    ) -> None:
        none = torch.zeros(plan.size, dtype=torch.bool)
        self._moves, self._held = movable or Movable(~none, none)
        self._plan, self._bounds, self._blocks = plan, tuple(wanted), tuple(blocks)
        self._scores = scores.detach().cpu().double().clone()
        self._order, self._ranks = in_order(plan, self._scores)
        self.most = {bound: bound.most for bound in wanted}

    def least(self, bound: Bound) -> Tensor:
        """Return the open gates after a bound has closed all it may: an axis's best block stays.

        Bounds on single axes close together: an axis may have to be as wide as another.
        """
        together = [each for each in self._bounds if each.measure.each_axis]
        closing = together if bound.measure.each_axis else [bound]
        stays = ~torch.stack([each.gates() for each in closing]).any(0)
        return self._rounded((self._best_of_each() | stays) & self._moves | self._held)

    def choose(self, open_: Tensor, *, fill: bool = True) -> SlotChoice:
        """Choose the gates to open, starting from those that are open.

        Args:
            fill: open more where the bounds leave room.

        Raises:
            UsageError: no choice was found that meets all bounds.
        """
        asked = open_ | self._best_of_each() & self._moves
        chosen = self._closed_for_all(SlotChoice(self._rounded(asked), asked))
        if not fill or not self._bounds:
            return chosen
        chosen = self._filled(chosen)
        for _ in range(_TURNS):
            wider = self._widened(chosen)
            if wider is chosen:
                break
            chosen = self._filled(wider)
        return chosen

    def _closed_for_all(self, start: SlotChoice) -> SlotChoice:
        """Close gates for one bound after the other until all are met.

        Since amounts are step functions, closing for one may raise another: bounds take turns.
        """
        chosen = self._cut_to_widths(start)
        for _ in range(_TURNS * len(self._bounds)):
            unmet = [bound for bound in self._bounds if not self._meets(bound, chosen)]
            if not unmet:
                break
            chosen = self._closed(chosen, unmet[0])
        for bound in self._bounds:
            if not self._meets(bound, chosen):
                raise self._refusal(bound)
        return chosen

    def _cut_to_widths(self, start: SlotChoice) -> SlotChoice:
        """Close, for all bounds on single axes at once, as many gates as exceed each."""
        fewer = start.open_.clone()
        for bound in self._bounds:
            if not bound.measure.each_axis or bound.through is None:
                continue
            (number,) = bound.through
            block, most = self._blocks[number], int(self.most[bound])
            most = max(block, most // block * block)
            order = self._ascending(start.open_ & bound.gates())
            moves = order[self._moves[order]]
            fewer[moves[: max(0, len(order) - most)]] = False
        return SlotChoice(self._rounded(fewer), start.asked & fewer)

    def _meets(self, bound: Bound, chosen: SlotChoice) -> bool:
        return bound.actual(chosen.open_) <= self.most[bound]

    def _closed(self, chosen: SlotChoice, bound: Bound) -> SlotChoice:
        """Close gates in ascending order of score until the bound is met."""
        order = self._ascending(chosen.open_ & ~self.least(bound))

        def without(number: int) -> SlotChoice:
            fewer = chosen.open_.clone()
            fewer[order[:number]] = False
            return SlotChoice(self._rounded(fewer), chosen.asked & fewer)

        def meets(number: int) -> bool:
            return self._meets(bound, without(number))

        count = len(order)
        number = _first(count, meets)
        if number < count or meets(count):
            return without(number)
        for number in range(count // _PROBES, count, max(1, count // _PROBES)):
            if meets(number):
                return without(number)
        raise self._refusal(bound)

    def _refusal(self, bound: Bound) -> OutOfReach:
        measure = bound.measure
        return OutOfReach(
            f"the budget {bound.limit} cannot be met: no choice of widths was found with "
            f"{measure.show(self.most[bound])} of {measure.label}, or less, that meets the other "
            "budgets, too. Give a larger one"
        )

    def _filled(self, start: SlotChoice) -> SlotChoice:
        """Open gates in descending order of score, except those that do not fit."""
        counted = torch.stack([bound.gates() for bound in self._bounds]).any(0)
        order = self._ascending(~start.open_ & counted & self._moves).flip(0)
        chosen = start
        for _ in range(_MISFITS):
            full = self._used_up(chosen)
            order = order if full is None else order[~full[order]]
            if not len(order):
                break
            fitting = self._fitting(chosen, order)
            chosen = self._with(chosen, order[:fitting])
            left = order[fitting + 1 :]
            order = left[~self._closed_with(int(order[fitting]))[left]] if len(left) else left
        return chosen

    def _widened(self, start: SlotChoice) -> SlotChoice:
        """Widen axes where that costs no more: a runtime may be faster at whole blocks.

        Opening one slot after another cannot reach these, since widths between cost more.
        """
        if all(bound.measure.blocks() is None for bound in self._bounds):
            return start
        chosen, limits = start, self._limits(start)
        for number in range(len(self._plan.axes)):
            for wider in self._wider(chosen, number):
                if all(bound.actual(wider.open_) <= most for bound, most in limits.items()):
                    chosen, limits = wider, self._limits(wider)
                    break
        return chosen

    def _limits(self, chosen: SlotChoice) -> dict[Bound, float]:
        """Return the limits of a wider choice: for measures with blocks, the present amount."""
        return {
            bound: most if bound.measure.blocks() is None else bound.actual(chosen.open_)
            for bound, most in self.most.items()
        }

    def _wider(self, chosen: SlotChoice, number: int) -> Iterator[SlotChoice]:
        """Yield choices with a cut axis opened completely, or up to whole blocks."""
        axis = self._plan.axes[number]
        width = int(chosen.open_[axis.slice].sum())
        may_widen = 0 < width < axis.size and bool(self._moves[axis.slice].all())
        if not may_widen or not axis.is_width:
            return
        for wide in (axis.size, *(ceil(width / block) * block for block in _WHOLE_BLOCKS)):
            if width < wide <= axis.size:
                open_ = chosen.open_.clone()
                self._open_best(open_, number, wide)
                yield SlotChoice(self._rounded(open_), chosen.asked)

    def _closed_with(self, slot: int) -> Tensor:
        """Return the slots that stay closed if this one does, since its group keeps one share.

        They are all slots of axes of its size, and the slots of lower rank in the other axes.
        """
        result = torch.zeros(self._plan.size, dtype=torch.bool)
        for numbers in self._plan.groups:
            axes = [self._plan.axes[number] for number in numbers]
            mine = next((a for a in axes if a.start <= slot < a.start + a.size), None)
            if mine is not None:
                least = self._ranks[slot] - 0.5 / mine.size
                for axis in axes:
                    is_beyond = self._ranks[axis.slice] < least
                    result[axis.slice] = is_beyond | (axis.size == mine.size)
        return result

    def _fitting(self, chosen: SlotChoice, order: Tensor) -> int:
        """Count the gates that can be opened, in this order, before a bound is exceeded."""

        def exceeds(number: int) -> bool:
            more = self._with(chosen, order[: number + 1])
            return not all(self._meets(bound, more) for bound in self._bounds)

        return _first(len(order), exceeds)

    def _with(self, chosen: SlotChoice, more: Tensor) -> SlotChoice:
        open_, asked = chosen.open_.clone(), chosen.asked.clone()
        open_[more] = asked[more] = True
        return SlotChoice(self._rounded(open_), asked)

    def _used_up(self, chosen: SlotChoice) -> Tensor | None:
        """Return the gates of bounds that are nearly used up, bool, flat; None if none are."""
        full = [
            torch.ones(self._plan.size, dtype=torch.bool) if b.through is None else b.gates()
            for b in self._bounds
            if b.actual(chosen.open_) > (1 - _SLACK) * self.most[b]
        ]
        return torch.stack(full).any(0) if full else None

    def _ascending(self, among: Tensor) -> Tensor:
        return self._order[among[self._order]]

    def _best_of_each(self) -> Tensor:
        best = torch.zeros(self._plan.size, dtype=torch.bool)
        for number, axis in enumerate(self._plan.axes):
            if not self._may_close(number):
                best[axis.start + int(self._scores[axis.slice].argmax())] = True
        return best

    def _may_close(self, number: int) -> bool:
        """Return whether the axis is a switch, or only a removable branch needs it."""
        axes, switch = self._plan.axes, self._plan.closing.get(number)
        is_movable = switch is not None and bool(self._moves[axes[switch].start])
        return axes[number].kind == KIND or is_movable

    def _rounded(self, open_: Tensor) -> Tensor:
        """Return the open gates with the best closed ones added, up to whole blocks.

        Axes that keep equally many slots have as many as the widest of them.
        """
        result = open_.clone()
        for number, block in enumerate(self._blocks):
            if block > 1:
                count = int(open_[self._plan.axes[number].slice].sum())
                self._open_best(result, number, block * ceil(count / block))
        for number in self._plan.limited:
            self._open_best(result, number, self._plan.least_allowed(number, result))
        for numbers in self._plan.equally_wide:
            slices = {number: self._plan.axes[number].slice for number in numbers}
            counts = {number: int(result[of].sum()) for number, of in slices.items()}
            for number in numbers:
                if counts[number] or number not in self._plan.closing:
                    self._open_best(result, number, max(counts.values()))
        return result

    def _open_best(self, open_: Tensor, number: int, count: int) -> None:
        """Open the best of an axis's closed slots until ``count`` are open; in place."""
        axis = self._plan.axes[number]
        mine = open_[axis.slice]
        missing = min(axis.size, count) - int(mine.sum())
        if missing > 0:
            closed = self._scores[axis.slice].masked_fill(mine, -torch.inf)
            open_[axis.start + closed.topk(missing).indices] = True


def in_order(plan: Plan, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots in ascending order of worth, and the rank of each; stable.

    In axes that keep one share the worth of a slot is the mean score of the slots of its rank, and
    slots of one rank are adjacent: scores do not distinguish axes of one group. A rank is the share
    of the axis with lower scores, plus half a slot; 0 in axes of no group.

    Shape: scores ``(plan.size,)``; result ``(plan.size,)``, int64, and the same, float64.
    """
    worth, ranks = scores.clone(), torch.zeros_like(scores)
    for numbers in plan.groups:
        axes = [plan.axes[number] for number in numbers]
        for axis in axes:
            order = scores[axis.slice].argsort(stable=True)
            places = torch.arange(axis.size, dtype=scores.dtype)
            ranks[axis.start + order] = (places + 0.5) / axis.size
        shares = torch.cat([ranks[axis.slice] for axis in axes]).unique()
        each = [scores[axis.slice].sort().values for axis in axes]
        levels = [of[(shares * len(of)).long().clamp(max=len(of) - 1)] for of in each]
        mean = torch.stack(levels).mean(0)
        for axis in axes:
            worth[axis.slice] = mean[torch.searchsorted(shares, ranks[axis.slice])]
    order = ranks.argsort(stable=True)
    return order[worth[order].argsort(stable=True)], ranks


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first of 0 … count-1 for which the monotone ``holds`` is true; count if none.

    The search takes few calls if the result is small, as it mostly is.
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


Widths = int | Literal["auto"]
"""Widths are multiples of this; ``"auto"``: of the blocks of the measures, or of the target."""


def times_on(target: str) -> WidthTimes:
    """Return the times over widths on a target, in all processes those of the first one.

    Raises:
        UsageError: no runtime has this name.
    """
    check_target(target)
    if not is_provided("width_times"):
        return WidthTimes(target, "by their MACs alone", {}, {LINEAR: 1.0}, math.inf)
    found: WidthTimes = run_on_first(lambda: provided("width_times")(target))
    return found


def blocks_of(
    plan: Plan, round_to: Widths, measures: Iterable[Measure], target: str = TARGET
) -> list[int]:
    """For each axis, the number of slots that open and close together.

    A number is for all axes but heads, groups, and single inputs of a layer that are cut beside
    whole maps. With ``"auto"`` it is the least common multiple over the measures that have blocks
    of their own; where none has, what the target is fast at.

    Raises:
        UsageError: ``round_to`` is neither, or there is no such target.
    """
    if round_to == "auto":
        wanted = [found for measure in measures if (found := measure.blocks()) is not None]
        if not wanted:
            return times_on(target).blocks(plan)
        return [lcm(*each) for each in zip(*wanted, strict=True)]
    check_whole("round_to", round_to)
    return [round_to if has_widths else 1 for has_widths in have_widths(plan)]
