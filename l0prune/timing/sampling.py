"""Widths to try: some that tell every axis from the others, and many that show the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from operator import ge

import torch
from torch import Tensor

from l0prune.plan.plan import Axis, Plan
from l0prune.selection.fitting import beside_maps
from l0prune.timing.sizes import SizeFinder

_TRIES = 50
_MOST = 7  # networks by which dims are told apart
_NARROWEST = 0.1  # of an axis, in samples
_STEPS = (8, 16, 32)  # what runtimes like widths to be multiples of
_ALIGNED = (0.0, 0.5, 1.0)
Widths = list[int]
"""The number of open slots of each axis."""


def telling_widths(plan: Plan, least: int, seed: int = 0) -> list[Widths]:
    """Widths of so many networks or more that tell all dims apart, beside the dense one.

    Random ones between a quarter and all of each axis, such as no other of its size has. A few
    heads have few widths: then it takes more networks until no two dims are always equally wide.

    Args:
        plan: whose axes.
        least: networks.
        seed: of chance.
    """
    wanted = _apart(plan, _drawn(plan, _MOST, seed + 1))
    for count in range(least, _MOST + 1):
        found = _drawn(plan, count, seed)
        if all(map(ge, _apart(plan, found), wanted)):
            break
    return found


def _apart(plan: Plan, networks: Sequence[Widths]) -> tuple[int, int]:
    """Count the dims whose sizes differ from all others in these networks and the dense one."""
    kept = [plan.kept(slots_of(plan, widths)) for widths in networks]
    return SizeFinder(plan, [all_slots(plan), *kept]).told_apart


def _drawn(plan: Plan, count: int, seed: int) -> list[Widths]:
    generator = torch.Generator().manual_seed(seed)
    taken: set[tuple[int, ...]] = set()
    drawn = []
    for axis in plan.axes:
        draws = (tuple(_fewer(axis, generator) for _ in range(count)) for _ in range(_TRIES))
        first = next(draws)
        free = (some for some in chain([first], draws) if (axis.size, *some) not in taken)
        some = next(free, first)
        taken.add((axis.size, *some))
        drawn.append(some)
    return [list(widths) for widths in zip(*drawn, strict=True)]


def _fewer(axis: Axis, generator: torch.Generator) -> int:
    """Some slots, but not all, if there are several."""
    low = max(1, axis.size // 4)
    return int(torch.randint(low, max(low + 1, axis.size), (), generator=generator))


def sampled_widths(
    plan: Plan, seed: int = 0, aligned: Sequence[float] = _ALIGNED
) -> Iterator[Widths]:
    """Random widths without end.

    Args:
        plan: whose axes.
        seed: of chance.
        aligned: in turns, the share of axes whose widths are whole blocks.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    for share in cycle(aligned):
        widths = []
        for axis in plan.axes:
            wanted = axis.size * (_NARROWEST + (1 - _NARROWEST) * uniform())
            step = _STEPS[int(uniform() * len(_STEPS))] if uniform() < share else 1
            step = step if step < axis.size else 1
            widths.append(min(axis.size, max(1, step, round(wanted / step) * step)))
        yield widths


def slots_of(plan: Plan, widths: Widths) -> Tensor:
    """Return a mask with this many slots of each axis; bool, shape ``(plan.size,)``.

    They are the first ones, but for single inputs that are cut beside whole maps. Those are spread
    over the maps, as gates leave them: the first ones would close whole maps, and the file would
    not have the node that picks inputs. The first map, which stays, always lacks some.

    Raises:
        ValueError: there are more or fewer widths than axes.
    """
    if len(widths) != len(plan.axes):
        raise ValueError(f"{len(widths)} widths are given for {len(plan.axes)} axes")
    sizes = torch.tensor([axis.size for axis in plan.axes])
    starts = torch.tensor([axis.start for axis in plan.axes])
    place = torch.arange(plan.size) - starts.repeat_interleave(sizes)
    open_ = place < torch.tensor(widths).repeat_interleave(sizes)
    for number in beside_maps(plan):
        axis, slots = plan.axes[number], torch.arange(widths[number])
        open_[axis.slice] = False
        open_[axis.start + axis.size - 1 - slots * axis.size // widths[number]] = True
    return open_


def all_slots(plan: Plan) -> Tensor:
    """Every slot; bool, flat."""
    return torch.ones(plan.size, dtype=torch.bool)
