"""Width multiples that a runtime prefers, for each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from l0prune.plan.plan import Plan
from l0prune.selection.blocks import blocks_of, have_widths
from l0prune.timing.sampling import Widths

_BLOCKS = (1, 4, 8, 16, 32)  # the finest first
_NARROWEST = 0.25  # of an axis: what budgets leave of most
_TRIED = 24  # networks by which blocks are compared
_WORTH = 1e-4  # by which a block has to be better than a finer one


def preferred_blocks(plan: Plan, time: Callable[[Widths], float]) -> list[int]:
    """For each axis the block by which networks that hold as many slots are fastest.

    Random widths are rounded to whole blocks, down or up, so that on average as many slots are left
    whatever the block is: where time is linear in a width, slots are counted one by one. From the
    best block for all axes, each axis in turn takes the best of its own. An axis keeps one block at
    least, which speaks against large ones. Slots whose number is no width are counted one by one.

    Args:
        plan: of the network.
        time: milliseconds by widths.
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


class _Between(NamedTuple):
    """A width between two that are whole blocks.

    Attributes:
        low, high: these two.
        part: of the way from the one to the other, from 0 to 1.
        chance: from 0 to 1; where it is less than the part, the width is rounded up.
    """

    low: int
    high: int
    part: float
    chance: float

    def by_chance(self) -> int:
        return self.high if self.chance < self.part else self.low


def _expected(time: Callable[[Widths], float], widths: Sequence[_Between], number: int) -> float:
    """The time where one width is as often rounded up as makes it right on average."""
    rounded, one = [each.by_chance() for each in widths], widths[number]

    def at(width: int) -> float:
        return time([*rounded[:number], width, *rounded[number + 1 :]])

    return (1 - one.part) * at(one.low) + one.part * at(one.high)


def _networks(plan: Plan) -> list[Callable[[Sequence[int]], list[_Between]]]:
    """Random networks; each says its widths for the blocks of all axes."""
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
    ) -> list[_Between]:
        return [
            _between(axis.size, each, chance, block)
            for axis, each, chance, block in zip(plan.axes, drawn, chances, blocks, strict=True)
        ]

    return [partial(rounded, *each) for each in zip(spread(), spread(), strict=True)]


def _between(size: int, drawn: float, chance: float, block: int) -> _Between:
    """A width of an axis of this size; ``drawn`` from 0, the narrowest, to 1, all of it."""
    wanted = size * (_NARROWEST + (1 - _NARROWEST) * drawn)
    low = min(size, max(block, int(wanted // block) * block))
    high = min(size, low + block)
    part = (wanted - low) / (high - low) if low < min(high, wanted) else 0.0
    return _Between(low, high, part, chance)
