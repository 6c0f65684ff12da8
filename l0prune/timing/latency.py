"""Latency as a measure: smooth for gates to learn by, in whole blocks for widths.

The blocks are the width multiples that a runtime prefers, axis by axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.gating.attaching import gates_of
from l0prune.plan.branch import KIND
from l0prune.plan.cost import Axes, CostModel
from l0prune.plan.layout import Layout, axes_of
from l0prune.plan.measures import Latency
from l0prune.plan.plan import Cost, Plan
from l0prune.plan.switches import switch, under_switches
from l0prune.selection.fitting import blocks_of, have_widths
from l0prune.timing.facts import Group
from l0prune.timing.latency_model import LatencyModel, LayoutSizes, Numbers
from l0prune.timing.sizes import Widths, slots_of

_BLOCKS = (1, 4, 8, 16, 32)  # the finest first
_NARROWEST = 0.25  # of an axis: what budgets leave of most
_TRIED = 24  # networks by which blocks are compared
_WORTH = 1e-4  # by which a block has to be better than a finer one


def preferred_blocks(plan: Plan, time: Callable[[Widths], float]) -> list[int]:
    """Return for each axis the block by which networks with as many slots are fastest.

    Random widths are rounded to whole blocks, down or up, so that on average as many slots are left
    whatever the block is: where time is linear in a width, slots are counted one by one. From the
    best block for all axes, each axis in turn takes the best of its own. An axis keeps one block at
    least, which speaks against large ones. Slots whose number is no width are counted one by one.
    """
    networks = _networks(plan)

    def total(blocks: list[int]) -> float:
        return sum(time([each.by_chance() for each in of(blocks)]) for of in networks)

    def with_one(blocks: list[int], number: int) -> float:
        return sum(_expected(time, of(blocks), number) for of in networks)

    best = min((blocks_of(plan, block, ()) for block in _BLOCKS), key=total)
    for number, has_widths in enumerate(have_widths(plan)):
        if has_widths:
            tried = [[*best[:number], block, *best[number + 1 :]] for block in _BLOCKS]
            times = [with_one(blocks, number) for blocks in tried]
            enough = min(times) * (1 + _WORTH)
            best = next(each for each, its in zip(tried, times, strict=True) if its <= enough)
    return best


class _BlockRounding(NamedTuple):
    """Width between two whole blocks: the part of the way between them is rounded up to the higher
    one where the chance, from 0 to 1, is less.
    """

    low: int
    high: int
    part: float
    chance: float

    def by_chance(self) -> int:
        return self.high if self.chance < self.part else self.low


def _expected(
    time: Callable[[Widths], float], widths: Sequence[_BlockRounding], number: int
) -> float:
    """Return the time where one width is rounded up as often as makes it right on average."""
    rounded, one = [each.by_chance() for each in widths], widths[number]

    def at(width: int) -> float:
        return time([*rounded[:number], width, *rounded[number + 1 :]])

    return (1 - one.part) * at(one.low) + one.part * at(one.high)


def _networks(plan: Plan) -> list[Callable[[Sequence[int]], list[_BlockRounding]]]:
    """Return random networks; each gives its widths for the blocks of all axes."""
    generator = torch.Generator().manual_seed(1)

    def spread() -> list[list[float]]:
        """Numbers from 0 to 1, those of each axis spread evenly."""
        shape = _TRIED, len(plan.axes)
        order = torch.rand(shape, generator=generator).argsort(0)
        numbers: list[list[float]] = (
            (order + torch.rand(shape, generator=generator)) / _TRIED
        ).tolist()
        return numbers

    def rounded(
        drawn: Sequence[float], chances: Sequence[float], blocks: Sequence[int]
    ) -> list[_BlockRounding]:
        return [
            _between(axis.size, each, chance, block)
            for axis, each, chance, block in zip(plan.axes, drawn, chances, blocks, strict=True)
        ]

    return [partial(rounded, *each) for each in zip(spread(), spread(), strict=True)]


def _between(size: int, drawn: float, chance: float, block: int) -> _BlockRounding:
    """Place a width of an axis of this size; ``drawn`` from 0, the narrowest, to 1, all of it."""
    wanted = size * (_NARROWEST + (1 - _NARROWEST) * drawn)
    low = min(size, max(block, int(wanted // block) * block))
    high = min(size, low + block)
    part = (wanted - low) / (high - low) if low < min(high, wanted) else 0.0
    return _BlockRounding(low, high, part, chance)


Observe = Callable[[Tensor], float]
"""The time of the network that keeps these slots, bool and flat, over that of the dense one."""

OVERHEAD = "the runtime itself, whatever the widths"


class TimedLatency(Latency):
    """Milliseconds of one network, predicted.

    Args:
        model: their times.
        smooth: the same for gates to learn by.
        dense: milliseconds of the dense network, as timed.
        observing: gives what times networks of a model here, if anything does.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        model: LatencyModel,
        smooth: LatencyModel,
        dense: float,
        observing: Callable[[nn.Module], Observe | None],
    ) -> None:
        owners = [*(group.owner for group in groups), OVERHEAD]
        convert = under_switches(plan)
        model, smooth = (_converted(each, convert) for each in (model, smooth))
        axes = {axis.name: number for number, axis in enumerate(plan.axes) if axis.kind == KIND}
        switches = [[axes[name] for name in group.branches if name in axes] for group in groups]
        switches.append([])  # the runtime itself
        super().__init__(plan, CostModel(plan, _costs(smooth, owners, self.name, switches)))
        self._owners, self._model = owners, model
        self._switches = [switches[term.group] for term in model.terms]
        self._sizes = LayoutSizes(plan, model.layouts)
        self._dense, self._observing = dense, observing

    def actual(self, open_: Tensor, through: Axes = None) -> float:
        """Milliseconds of an export with these open gates."""
        return float(self._values(self.plan.kept(open_), through).sum())

    def dense(self, through: Axes = None) -> float:
        """Milliseconds of the dense network, as timed; of a part of it, as predicted."""
        if through is None:
            return self._dense
        return self.actual(torch.ones(self.plan.size, dtype=torch.bool), through)

    def by_owner(self, kept: Tensor) -> dict[str, float]:
        """Milliseconds of each module, and those that no module takes; together the whole time."""
        result: dict[str, float] = defaultdict(float)
        for term, ms in zip(self._model.terms, self._values(kept > 0, None), strict=True):
            result[self._owners[term.group]] += float(ms)
        return dict(result)

    def filling_by_owner(self, kept: Tensor, asked: Tensor) -> dict[str, float]:
        """Return each module's milliseconds for positions that round its widths up, by path.

        These are slots that stay beside those that were ``asked`` for, both bool and flat, and what
        the runtime computes beyond them to fill its blocks.
        """
        shares = self._model.asked_shares(self._sizes(kept), self._sizes(asked))
        filling = self._values(kept, None) * (1 - shares)
        result: dict[str, float] = defaultdict(float)
        for term, ms in zip(self._model.terms, filling, strict=True):
            result[self._owners[term.group]] += float(ms)
        return dict(result)

    def blocks(self) -> list[int]:
        """Return for each axis the block of slots in which the runtime prefers it to be cut."""
        return self._blocks

    @cached_property
    def _blocks(self) -> list[int]:
        def time(widths: list[int]) -> float:
            return self.actual(slots_of(self.plan, widths))

        return preferred_blocks(self.plan, time)

    def observed(self, model: nn.Module) -> float | None:
        """Milliseconds of the model with its gates as they stand, timed beside the dense one.

        None where the table is of another machine.
        """
        observe = self._observing(model)
        if observe is None:
            return None
        return self._dense * observe(self.plan.kept(gates_of(model).open()))

    def _values(self, kept: Tensor, through: Axes) -> Numbers:
        are_there = np.append(kept.numpy() > 0, True)[self._needed].all(-1)  # branches of each term
        values: Numbers = self._model.values(self._sizes(kept)) * are_there
        return values if through is None else values * self._meets(through)

    @cached_property
    def _needed(self) -> Any:
        """Return for each term the slots of its switches, padded with one that is always there."""
        starts = [axis.start for axis in self.plan.axes]
        width = max([1, *map(len, self._switches)])
        filled = [[*of, *[len(starts)] * (width - len(of))] for of in self._switches]
        return np.array([*starts, self.plan.size])[np.array(filled, dtype=int).reshape(-1, width)]

    def _meets(self, through: frozenset[int]) -> Any:
        """Return 1 for each term that one of these axes could take away, else 0."""
        of_layout = [axes_of(layout) for layout in self._model.layouts]
        pairs = zip(self._model.terms, self._switches, strict=True)
        axes = (set(of).union(*(of_layout[s.layout] for s in term.steps)) for term, of in pairs)
        return np.array([float(not through.isdisjoint(each)) for each in axes])


def _converted(model: LatencyModel, convert: Callable[[Layout], Layout]) -> LatencyModel:
    return replace(model, layouts=tuple(map(convert, model.layouts)))


def _costs(
    smooth: LatencyModel, owners: Sequence[str], unit: str, switches: Sequence[Sequence[int]]
) -> list[Cost]:
    costs = []
    for term in smooth.terms:
        owner, sizes = owners[term.group], (smooth.layouts[s.layout] for s in term.factors)
        costs.append(Cost(owner, unit, term.ms, (*sizes, *map(switch, switches[term.group]))))
    return costs
