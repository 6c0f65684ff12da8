"""Latency as a measure: smooth for learning gates, in whole blocks for choosing widths.

The blocks are the width multiples that a runtime prefers, axis by axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.features.latency.facts import Group
from l0prune.features.latency.latency_model import LatencyModel, LayoutSizes, Numbers
from l0prune.features.latency.sizes import Widths, slots_of_each
from l0prune.gating.attaching import gates_of
from l0prune.plan.branch import KIND
from l0prune.plan.cost import Axes, CostModel
from l0prune.plan.layout import Layout, axes_of
from l0prune.plan.measures import Latency
from l0prune.plan.plan import Cost, Plan
from l0prune.plan.switches import switch, under_switches
from l0prune.plan.width_times import have_widths
from l0prune.progress.stages import stage
from l0prune.selection.fitting import blocks_of

_BLOCKS = (1, 4, 8, 16, 32)  # the finest first
_NARROWEST = 0.25  # share of an axis: the least that budgets leave of most axes
_TRIED = 24  # networks by which blocks are compared
_WORTH = 1e-4  # relative gain in time by which a block has to beat a finer one


def preferred_blocks(plan: Plan, times: Callable[[Sequence[Widths]], Numbers]) -> list[int]:
    """Return for each axis the block with which networks of equal slot counts are fastest.

    Random widths are rounded to whole blocks, down or up, so that the mean number of slots does not
    depend on the block: where time is linear in a width, the block is 1. From the best common
    block, each axis in turn changes to its best block. An axis keeps at least one block, which
    disfavors large ones. The block is 1 on axes whose number of slots is no width of a tensor.

    ``times`` returns the time of each of several networks.
    """
    networks = _networks(plan)

    def totals(tried: Sequence[list[int]], number: int | None = None) -> list[float]:
        """Return the time of all networks with each of these blocks, of which one is rounded."""
        weighted = [
            [pair for of in networks for pair in _weighted(of(blocks), number)] for blocks in tried
        ]
        found = iter(times([widths for pairs in weighted for widths, _ in pairs]))
        return [sum(weight * float(next(found)) for _, weight in pairs) for pairs in weighted]

    common = [blocks_of(plan, block, ()) for block in _BLOCKS]
    best = _fastest(common, totals(common), 0)
    for number, has_widths in enumerate(have_widths(plan)):
        if has_widths:
            tried = [[*best[:number], block, *best[number + 1 :]] for block in _BLOCKS]
            best = _fastest(tried, totals(tried, number), _WORTH)
    return best


def _fastest(tried: Sequence[list[int]], times: Sequence[float], worth: float) -> list[int]:
    """Return the first of the fastest, within a share ``worth`` of the least time."""
    enough = min(times) * (1 + worth)
    return next(each for each, its in zip(tried, times, strict=True) if its <= enough)


class _BlockRounding(NamedTuple):
    """Width ``part`` (0 to 1) of the way from ``low`` to ``high``; high if ``chance`` is less."""

    low: int
    high: int
    part: float
    chance: float

    def by_chance(self) -> int:
        return self.high if self.chance < self.part else self.low


def _weighted(
    widths: Sequence[_BlockRounding], number: int | None
) -> Iterator[tuple[Widths, float]]:
    """Yield networks with their probabilities over the random rounding of one width, if any."""
    rounded = [each.by_chance() for each in widths]
    if number is None:
        yield rounded, 1.0
        return
    one = widths[number]
    for width, weight in ((one.low, 1 - one.part), (one.high, one.part)):
        if weight:
            yield [*rounded[:number], width, *rounded[number + 1 :]], weight


def _networks(plan: Plan) -> list[Callable[[Sequence[int]], list[_BlockRounding]]]:
    """Return random networks, each a function from the blocks of all axes to its widths."""
    generator = torch.Generator().manual_seed(1)

    def spread() -> list[list[float]]:
        """Draw numbers from 0 to 1, stratified for each axis (a Latin hypercube)."""
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
    """Return a width of an axis of this size; ``drawn`` is from 0, narrowest, to 1, all of it."""
    wanted = size * (_NARROWEST + (1 - _NARROWEST) * drawn)
    low = min(size, max(block, int(wanted // block) * block))
    high = min(size, low + block)
    part = (wanted - low) / (high - low) if low < min(high, wanted) else 0.0
    return _BlockRounding(low, high, part, chance)


Observe = Callable[[Tensor], float]
"""Ratio of the time of the network that keeps these slots, bool and flat, to the dense one's."""

OVERHEAD = "the runtime itself, whatever the widths"


class TimedLatency(Latency):
    """Predicted milliseconds of one network, as a measure.

    Args:
        model: times of the groups, and of the runtime itself.
        smooth: smooth approximation of ``model``, for learning gates.
        dense: milliseconds of the dense network, as timed.
        observing: returns the function that times a model's networks here; None without one.
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
        """Return milliseconds by module path, with the runtime's part under ``OVERHEAD``."""
        result: dict[str, float] = defaultdict(float)
        for term, ms in zip(self._model.terms, self._values(kept > 0, None), strict=True):
            result[self._owners[term.group]] += float(ms)
        return dict(result)

    def filling_by_owner(self, kept: Tensor, asked: Tensor) -> dict[str, float]:
        """Return the milliseconds spent on positions that only fill blocks, by module path.

        These are slots that are ``kept`` but not ``asked`` for, both bool and flat, and positions
        that the runtime computes beyond the kept ones to fill its blocks.
        """
        shares = self._model.asked_shares(self._sizes(kept), self._sizes(asked))
        filling = self._values(kept, None) * (1 - shares)
        result: dict[str, float] = defaultdict(float)
        for term, ms in zip(self._model.terms, filling, strict=True):
            result[self._owners[term.group]] += float(ms)
        return dict(result)

    def blocks(self) -> list[int]:
        """Return for each axis the block of slots that the runtime prefers."""
        return self._blocks

    @cached_property
    def _blocks(self) -> list[int]:
        return preferred_blocks(self.plan, self._times)

    def _times(self, networks: Sequence[Widths]) -> Numbers:
        """Return the milliseconds of networks of these widths."""
        distinct = {widths: number for number, widths in enumerate({*map(tuple, networks)})}
        opened = slots_of_each(self.plan, [list(widths) for widths in distinct])
        kept = torch.stack([self.plan.kept(open_) for open_ in opened])
        sizes = np.stack([self._sizes(each) for each in kept])
        there = np.pad(kept.numpy(), ((0, 0), (0, 1)), constant_values=True)
        values = self._model.values(sizes) * there[:, self._needed].all(-1)
        found: Numbers = values.sum(-1)[[distinct[tuple(widths)] for widths in networks]]
        return found

    def observed(self, model: nn.Module) -> float | None:
        """Return milliseconds of the model at its current gates, timed beside the dense network.

        None if the table is from another machine.
        """
        observe = self._observing(model)
        if observe is None:
            return None
        with stage("timing the network that is chosen"):
            return self._dense * observe(self.plan.kept(gates_of(model).open()))

    def _values(self, kept: Tensor, through: Axes) -> Numbers:
        are_there = np.append(kept.numpy() > 0, True)[self._needed].all(-1)  # branches of each term
        values: Numbers = self._model.values(self._sizes(kept)) * are_there
        return values if through is None else values * self._meets(through)

    @cached_property
    def _needed(self) -> Any:
        """Return for each term the slots of its switches, padded with one that is always open."""
        starts = [axis.start for axis in self.plan.axes]
        width = max([1, *map(len, self._switches)])
        filled = [[*of, *[len(starts)] * (width - len(of))] for of in self._switches]
        return np.array([*starts, self.plan.size])[np.array(filled, dtype=int).reshape(-1, width)]

    def _meets(self, through: frozenset[int]) -> Any:
        """Return 1 for each term that depends on one of these axes, else 0."""
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
