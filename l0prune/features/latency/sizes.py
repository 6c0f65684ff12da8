"""Widths of networks to time, and the layouts whose sizes are numbers in their files.

A number is matched to a layout by its values in files of several widths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, product
from math import gcd
from operator import ge

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.plan.layout import Cat, Const, Layout, Prod, axes_of
from l0prune.plan.plan import Axis, Plan
from l0prune.plan.switches import without_switches
from l0prune.plan.width_times import beside_maps


def check_single_network(parts: Sequence[str]) -> None:
    """Refuse a model that was captured in several parts, given by the paths of their modules."""
    if len(parts) == 1:
        return
    paths = ", ".join(map(repr, parts[:3]))
    raise UsageError(
        f"this model becomes {len(parts)} networks ({paths}, …), since it could only be captured "
        "in parts: there is no one time of it. Gate and measure one of these submodules, or mend "
        "what the survey names as the reason"
    )


Numbers = tuple[int, ...]
"""One number in each of the files that are compared."""


@dataclass(frozen=True, slots=True)
class Size:
    """Integer that depends on the widths: ``offset + times · |layout| / over``.

    Attributes:
        layout: constant, of one position, where the number is the same at all widths.
    """

    layout: Layout
    times: int = 1
    over: int = 1
    offset: int = 0

    def at(self, positions: int) -> int:
        """Return the number for this many open positions of the layout."""
        return self.offset + self.times * positions // self.over

    @property
    def is_constant(self) -> bool:
        """Return whether the number is the same at all widths."""
        return not axes_of(self.layout)


def constant(number: int) -> Size:
    """Return a size that is the same at all widths."""
    return Size(Const(1), 0, 1, number)


Dims = tuple[Size | None, ...]
"""Sizes of the dims of a tensor; None where one is unknown."""


class SizeFinder:
    """Finder of the layout of a number, given its values at several choices of slots.

    In some file, any two axes of the same size should keep different numbers of slots.
    """

    def __init__(self, plan: Plan, kept: Sequence[Tensor]) -> None:
        self.plan, self._kept = plan, kept
        self._numbers: dict[Layout, Numbers] = {}
        self._by_numbers: dict[Numbers, Layout] = {}
        self._by_direction: dict[Numbers, Layout] = {}
        self._by_steps: dict[Numbers, Layout] = {}
        for layout in _layouts(plan):
            numbers = self.numbers(layout)
            self._by_numbers.setdefault(numbers, layout)
            self._by_direction.setdefault(_direction(numbers), layout)
            self._by_steps.setdefault(_steps(numbers), layout)

    @property
    def distinct_counts(self) -> tuple[int, int]:
        """Numbers of distinct layouts by their sizes in the files, exactly and up to a factor."""
        return len(self._by_numbers), len(self._by_direction)

    @property
    def known(self) -> list[Numbers]:
        """Sizes of layouts in the files, each once."""
        return list(self._by_numbers)

    def numbers(self, layout: Layout) -> Numbers:
        """Return the open positions of a layout in each file."""
        if layout not in self._numbers:
            masks = (self.plan.mask(layout, kept) for kept in self._kept)
            self._numbers[layout] = tuple(int(mask.sum()) for mask in masks)
        return self._numbers[layout]

    def dims(self, shapes: Sequence[Sequence[int]]) -> Dims:
        """Return the sizes of the dims of a tensor, given its shape in each file."""
        return tuple(self.find(column) for column in zip(*shapes, strict=True))

    def find(self, numbers: Numbers, hint: Layout | None = None) -> Size | None:
        """Return the ``Size`` with these values in the files; None if none is known.

        ``hint`` is the layout to prefer, if it fits.
        """
        if len(set(numbers)) == 1:
            return constant(numbers[0])
        if hint is not None and self.numbers(hint) == numbers:
            return Size(without_switches(self.plan, hint))
        if numbers in self._by_numbers:
            return Size(self._by_numbers[numbers])
        if all(number > 0 for number in numbers):
            layout = self._by_direction.get(_direction(numbers)) or self._product(numbers)
            if layout is not None:
                return self._scaled(layout, numbers)
        for sign in (1, -1):  # -1: a constant minus the size of a layout
            layout = self._by_steps.get(_steps([sign * number for number in numbers]))
            if layout is not None:
                return Size(layout, sign, offset=numbers[0] - sign * self.numbers(layout)[0])
        return None

    def _scaled(self, layout: Layout, numbers: Numbers) -> Size:
        own = self.numbers(layout)
        common = gcd(numbers[0], own[0])
        return Size(layout, numbers[0] // common, own[0] // common)

    def _product(self, numbers: Numbers) -> Layout | None:
        """Return a product of two layouts with sizes proportional to the numbers, if any."""
        for first in list(self._by_direction.values()):
            own = self.numbers(first)
            if all(number % size == 0 for number, size in zip(numbers, own, strict=True)):
                rest = tuple(number // size for number, size in zip(numbers, own, strict=True))
                second = self._by_direction.get(_direction(rest))
                if second is not None:
                    return Prod((first, second))
        return None


def _layouts(plan: Plan) -> Iterator[Layout]:
    """Yield the layouts whose size a number may be, the simplest first."""
    dims = [dim for dims in plan.tensors.values() for dim in dims]
    dims += [dim for cost in plan.costs for dim in cost.dims]
    dims = [without_switches(plan, dim) for dim in dims]
    found = dict.fromkeys(dim for dim in dims if axes_of(dim))
    plain = sorted(found, key=lambda layout: len(axes_of(layout)))
    yield from plain
    for layout in plain:  # the groups of a convolution are a factor of a dim
        if isinstance(layout, Prod):
            yield from (factor for factor in layout.factors if axes_of(factor))
    for layout in plain:  # offsets at which a concatenation is split again
        if isinstance(layout, Cat):
            for parts in accumulate((p,) for p in layout.parts[:-1]):
                yield Cat(parts)


def _direction(numbers: Numbers) -> Numbers:
    """Return the numbers divided by their greatest common divisor."""
    common = gcd(*numbers) or 1
    return tuple(number // common for number in numbers)


def _steps(numbers: Sequence[int]) -> Numbers:
    """Return the numbers minus the first one."""
    return tuple(number - numbers[0] for number in numbers)


SMALL = 7  # integers up to this are taken for constants, such as numbers of dims
_TRIES = 50  # for the widths of one axis
_DRAWS = 4  # for those of all axes, before networks are added
_MOST = 7  # networks, at most, that are compared to tell dims apart
_NARROWEST = 0.1  # least share of an axis in samples
_STEPS = (8, 16, 32)  # blocks of which runtimes prefer multiples
_ALIGNED = (0.0, 0.5, 1.0)
_WHOLE = (0.0, 0.5)  # shares of the axes that are not cut
Widths = list[int]
"""Number of open slots of each axis."""


def distinguishing_widths(plan: Plan, least: int, seed: int = 0) -> list[Widths]:
    """Return widths of ``least`` networks or more that tell all dims apart, with the dense one.

    They are random, from a quarter of each axis to all of it; ``kept_whole`` names the axes that
    are not cut. An axis of a few heads has few widths: then networks are added, up to ``_MOST``,
    until no two dims are equally wide, or in one proportion, in all of them.
    """
    whole = [axis.size for axis in plan.axes]
    wanted = _finder(plan, [whole, *_drawn(plan, _MOST, 0)]).distinct_counts
    for count, number in product(range(least, _MOST + 1), range(_DRAWS)):
        found = _drawn(plan, count, seed * _DRAWS + number)
        if all(map(ge, _finder(plan, [whole, *found]).distinct_counts, wanted)):
            break
    return found


def are_distinguishing(plan: Plan, networks: Sequence[Widths]) -> bool:
    """Return whether no two dims that follow the widths are equally wide in all these networks.

    None is then the same in all of them, either, but for those of axes that are kept whole.
    """
    dense = [axis.size for axis in plan.axes]
    finder, whole = _finder(plan, networks), kept_whole(plan)
    follow = (finder.numbers(dim) for dim in _layouts(plan) if not axes_of(dim) <= whole)
    is_fixed = any(len({*numbers}) == 1 and numbers[0] > 1 for numbers in follow)
    return not is_fixed and len(finder.known) >= len(_finder(plan, [dense, *networks]).known)


def unmistakable_widths(plan: Plan, constants: Collection[int]) -> Widths | None:
    """Return widths at which each dim is told by its size alone; None if none were found.

    No dim that follows the widths then has the size of another one, nor one of these constants.
    """
    dense = [axis.size for axis in plan.axes]
    wanted, _ = _finder(plan, [dense, *_drawn(plan, _MOST, 0)]).distinct_counts
    known = {*range(SMALL + 1), *constants}
    for seed in range(_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        taken, widths = set(known), list[int]()
        for axis in plan.axes:
            draws = [_fewer(axis, generator) for _ in range(_TRIES)]
            widths.append(next((width for width in draws if width not in taken), draws[0]))
            taken.add(widths[-1])
        found = _finder(plan, [dense, widths]).known
        cut = [size for before, size in found if size != before]
        same = known.union(size for before, size in found if size == before)
        if len(found) >= wanted and len({*cut}) == len(cut) and same.isdisjoint(cut):
            return widths
    return None


def _finder(plan: Plan, networks: Sequence[Widths]) -> SizeFinder:
    return SizeFinder(plan, [plan.kept(slots_of(plan, widths)) for widths in networks])


def _drawn(plan: Plan, count: int, seed: int) -> list[Widths]:
    """Draw widths of some networks, in another proportion for each axis where that is possible."""
    generator = torch.Generator().manual_seed(seed)
    taken = {(1,) * count}
    drawn = []
    for axis in plan.axes:
        most = axis.size + (axis.size <= _FEW)
        first = tuple(_fewer(axis, generator) for _ in range(count))
        draws = (tuple(_fewer(axis, generator, most) for _ in range(count)) for _ in range(_TRIES))
        cuts = (some for some in draws if {*some} != {axis.size})
        some = next((some for some in chain([first], cuts) if _direction(some) not in taken), first)
        taken.add(_direction(some))
        drawn.append(some)
    return [list(widths) for widths in zip(*drawn, strict=True)]


def _fewer(axis: Axis, generator: torch.Generator, most: int | None = None) -> int:
    """Draw a number of slots from two to less than ``most``, by default less than all.

    An axis that is kept whole has all of its slots.
    """
    if _stays_whole(axis):
        return axis.size
    low = max(2, axis.size // 4)
    return int(torch.randint(low, max(low + 1, most or axis.size), (), generator=generator))


_FEW = 8  # slots of an axis, of which some networks have all, since it has few widths


def kept_whole(plan: Plan) -> frozenset[int]:
    """Return the numbers of the axes that are not cut in networks that are compared or timed.

    They have two slots or one. Exporters leave out what changes nothing at a size of 1, such as a
    Reshape into one head, so that a file with one slot has other nodes.
    """
    return frozenset(number for number, axis in enumerate(plan.axes) if _stays_whole(axis))


def _stays_whole(axis: Axis) -> bool:
    return axis.size <= 2


def sampled_widths(
    plan: Plan, seed: int = 0, aligned: Sequence[float] = _ALIGNED
) -> Iterator[Widths]:
    """Yield the widths of the dense network, then random ones without end.

    Axes of two slots stay whole. The share of the others whose widths are whole blocks cycles
    through ``aligned``. In every other network half of the axes are not cut: a fast path may
    require whole blocks of several axes at once, and most budgets leave many axes as they are.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    stay = kept_whole(plan)
    yield [axis.size for axis in plan.axes]
    for share, whole in zip(cycle(aligned), cycle(_WHOLE), strict=False):
        widths = []
        for number, axis in enumerate(plan.axes):
            wanted = axis.size * (_NARROWEST + (1 - _NARROWEST) * uniform())
            largest = _STEPS[int(uniform() * len(_STEPS))] if uniform() < share else 1
            step = max([1, *(each for each in _STEPS if each <= largest and each < axis.size)])
            width = min(axis.size, max(1, step, round(wanted / step) * step))
            is_whole = number in stay or (whole and uniform() < whole)
            widths.append(axis.size if is_whole else width)
        yield widths


def slots_of(plan: Plan, widths: Widths) -> Tensor:
    """Return a mask with this many slots of each axis; bool, shape ``(plan.size,)``.

    These are the first slots, except for single inputs that are cut beside whole maps. Such inputs
    are drawn at random, as gates leave them: what is closed at regular places, in whatever order
    the inputs are, can be whole maps, and the file would lack the node that picks inputs. The first
    input, which is of a map that is kept, is closed first.
    """
    return slots_of_each(plan, [widths])[0]


def slots_of_each(plan: Plan, networks: Sequence[Widths]) -> Tensor:
    """Return ``slots_of`` for each network; shape ``(networks, plan.size)``."""
    for widths in networks:
        if len(widths) != len(plan.axes):
            raise ValueError(f"{len(widths)} widths are given for {len(plan.axes)} axes")
    sizes = torch.tensor([axis.size for axis in plan.axes])
    starts = torch.tensor([axis.start for axis in plan.axes])
    place = torch.arange(plan.size) - starts.repeat_interleave(sizes)
    open_ = place < torch.tensor(networks).repeat_interleave(sizes, dim=1)
    for number in beside_maps(plan):
        axis = plan.axes[number]
        order = torch.randperm(axis.size - 1, generator=torch.Generator().manual_seed(0)) + 1
        order = torch.cat([order, torch.zeros(1, dtype=torch.long)]) + axis.start
        open_[:, axis.slice] = False
        for row, widths in zip(open_, networks, strict=True):
            row[order[: widths[number]]] = True
    return open_


def all_slots(plan: Plan) -> Tensor:
    """Return a mask of every slot; bool, flat."""
    return torch.ones(plan.size, dtype=torch.bool)
