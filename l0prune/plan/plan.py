"""The plan: every axis of one network, where it meets the weights, and what it costs. Pure data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.plan.activations import Activation
from l0prune.plan.branch import KIND, Branch
from l0prune.plan.code import Code
from l0prune.plan.divisor import Divisor
from l0prune.plan.layout import (
    Cat,
    Const,
    Gated,
    Layout,
    Layouts,
    Pick,
    Prod,
    Slots,
    axes_of,
    gate_table,
    merged,
    only,
    picked,
    substitute,
    without_factors,
)

BITS = "bits"  # kind of the axes that are bits of a tensor, not slots of one


def narrowed(layout: Layout, kept: Callable[[int], Tensor]) -> tuple[Layout, Tensor]:
    """Return the layout of the kept positions, and their mask.

    Args:
        layout: the layout to narrow.
        kept: from the number of an axis to the mask of its kept slots, bool.

    Returns:
        The layout of the kept positions, in order, and a mask over all positions, bool, shape
        ``(layout.size,)``.
    """
    match layout:
        case Const(size):
            return layout, torch.ones(size, dtype=torch.bool)
        case Slots(axis, start, stop):
            stays = kept(axis)
            first, count = int(stays[:start].sum()), int(stays[start:stop].sum())
            return Slots(axis, first, first + count), stays[start:stop]
        case Cat(parts):
            layouts, masks = zip(*(narrowed(part, kept) for part in parts), strict=True)
            return Cat(layouts), torch.cat(masks)
        case Prod(factors):
            whole = torch.ones(1, dtype=torch.bool)
            left = []
            for factor in factors:
                own, mask = narrowed(factor, kept)
                left.append(own)
                whole = (whole[:, None] & mask).flatten()
            return Prod(tuple(left)), whole
        case Gated(base, fine):
            (coarse, of_base), (finer, of_fine) = narrowed(base, kept), narrowed(fine, kept)
            both = of_base & of_fine
            return Gated(those(coarse, of_base, both), those(finer, of_fine, both)), both
        case Pick(base, index):
            own, mask = narrowed(base, kept)
            at = torch.tensor(index, dtype=torch.int64)
            stays = mask[at]
            return picked(own, _numbers(mask, at[stays])), stays


def those(layout: Layout, mask: Tensor, wanted: Tensor) -> Layout:
    """Return the positions ``wanted`` of a layout of the positions in ``mask``; both bool masks."""
    assert not (wanted & ~mask).any(), "what is wanted has been cut"
    if torch.equal(mask, wanted):
        return layout
    return picked(layout, _numbers(mask, wanted.nonzero().flatten()))


def _numbers(mask: Tensor, positions: Tensor) -> tuple[int, ...]:
    """Return the rank of positions among those in ``mask``."""
    return tuple((mask.cumsum(0) - 1)[positions].tolist())


@dataclass(frozen=True, slots=True)
class Axis:
    """A set of interchangeable slots that a gate vector belongs to.

    Attributes:
        name: readable and unique in its plan, after the module that writes the axis.
        kind: ``channel``, ``neuron``, ``head``, ``head_dim``, ``group``, ``input``, ``branch``,
            ``vocabulary`` or ``expert``; or ``bits``, whose slots are bits of a tensor that is
            quantized (the feature ``int8``).
        size: number of slots.
        start: offset of the first slot in the flat vector of all gates.
        group_size: |g| of the paper's eq. 16, the number of weights counted for one gate:
            a conv filter for the map it writes, a column of each Linear that reads a neuron.
        keeps_one: whether one of its gates is always open, since with all closed the network would
            divide zero by zero, as a spectral norm does.
    """

    name: str
    kind: str
    size: int
    start: int
    group_size: int
    keeps_one: bool = False

    @property
    def slice(self) -> slice:
        """Range of the axis in the flat vector of all gates."""
        return slice(self.start, self.start + self.size)

    @property
    def is_width(self) -> bool:
        """Return whether its slots are parts of layers: no switch of a branch, and no bits."""
        return self.kind not in (KIND, BITS)


@dataclass(frozen=True, slots=True)
class Pin:
    """A place that may not be cut, and why.

    Attributes:
        where: the parameter and dimension, e.g. ``"fc.weight dim 0"``.
        reason: for a person to read.
        operator: the operator that forced it, if one did.
        source: file and line in the user's code, if known.
    """

    where: str
    reason: str
    operator: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """One place where gates act: ``tensor`` is multiplied by ``spread(layout, z)`` along ``dim``.

    ``role`` is ``"read"`` where the axis is contracted away and ``"write"`` where it is produced.
    """

    tensor: str
    dim: int
    layout: Layout
    role: Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Cost:
    """``scale × Π open size of dims`` parameters, multiply-accumulates, … of one module.

    ``unit`` is the name of the measure that it belongs to. ``tensor`` is the parameter that is
    counted or multiplied with; empty where there is none. ``needed`` are groups of branches: the
    cost counts while all branches of one group are present, and always where a group is empty.
    """

    owner: str
    unit: str
    scale: float
    dims: Layouts
    tensor: str = ""
    needed: tuple[tuple[str, ...], ...] = ((),)


@dataclass(frozen=True)
class Plan:
    """Axes of a network, pins with their reasons, and the cost of each part.

    Attributes:
        axes: the axes that gates belong to, in the order of the flat gate vector.
        pins: what may not be cut.
        tensors: a layout for each dim of each parameter, buffer and constant, by its name.
        sites: where gates act on parameters and buffers.
        costs: the terms of the parameter and MAC counts (MACs for one example).
        aliases: other names of tied tensors, each with the name used in ``tensors``.
        parts: the submodules that were captured one by one, as the whole model could not be;
            ``("",)`` where it could.
        roles: for each parameter that is multiplied with, the role of each of its dims:
            ``"read"`` contracts an axis away, ``"write"`` produces one, ``""`` neither.
        wider: pairs of dims of which the first has to keep more positions than the second.
        alike: dims that have to keep equally many positions, since a module's code has one number
            for all of them.
        together: groups of axes, by name, that keep one share of their slots; those of one size
            keep equally many.
        allowed: by the name of an axis the numbers of slots that it may keep, ascending; any number
            for an axis without an entry.
        divisors: further limits of ``allowed`` axes, by the widths of others.
        code: the sizes that the code of the modules depends on.
        activations: the values that the captured graph computes.
        branches: the parts that can get a switch, one gate for the whole part.
    """

    axes: tuple[Axis, ...]
    pins: tuple[Pin, ...]
    tensors: dict[str, Layouts]
    sites: tuple[Site, ...]
    costs: tuple[Cost, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ("",)
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wider: tuple[tuple[Layout, Layout], ...] = ()
    alike: tuple[Layouts, ...] = ()
    code: Code = field(default_factory=Code)
    activations: tuple[Activation, ...] = ()
    branches: tuple[Branch, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    allowed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    divisors: tuple[Divisor, ...] = ()

    def __deepcopy__(self, _: dict[int, Any]) -> Plan:
        """Return the plan itself, which is immutable; models are copied at every cut."""
        return self

    @property
    def in_parts(self) -> bool:
        """Return whether submodules were captured one by one."""
        return self.parts != ("",)

    @property
    def size(self) -> int:
        """Number of gates."""
        return sum(axis.size for axis in self.axes)

    @cached_property
    def slots(self) -> int:
        """Number of gates without those of bits, which come last."""
        return next((axis.start for axis in self.axes if axis.kind == BITS), self.size)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(axis.name for axis in self.axes)

    def flat(self, slots: Slots) -> slice:
        """Return the range of these slots in the flat vector of all gates."""
        start = self.axes[slots.axis].start
        return slice(start + slots.start, start + slots.stop)

    def gate_table(self, layout: Layout) -> Tensor:
        """Return the gates that multiply at each position of ``layout``; ``size`` means no gate.

        Shape: ``(factors, layout.size)``, int64; no rows where the layout has no axis.
        """
        return gate_table(layout, self.flat, one=self.size)

    def spread(self, layout: Layout, values: Tensor) -> Tensor:
        """Return per position of ``layout`` the product of its entries of the flat ``values``.

        With gate values it is the multiplier of each column, with open probabilities the
        probability that the position is alive. Where no gate acts it is one. Differentiable.
        """
        return torch.cat([values, values.new_ones(1)])[self.gate_table(layout)].prod(0)

    def mask(self, layout: Layout, kept: Tensor) -> Tensor:
        """Return a bool mask of the kept positions; ``kept`` is bool, flat, shape (size,)."""
        return _alive(self.gate_table(layout), kept)

    def kept(self, open_: Tensor) -> Tensor:
        """Return the slots that a sliced model keeps, as a flat bool vector.

        An open slot without readers (all its fine gates are closed) is removed; an axis whose gates
        are all closed keeps its first slot, whose weights are zero, unless it is a branch's switch.
        An axis of ``closing`` without slots removes its branch, even if the switch is open. A dim
        that has to stay ``wider`` than another, or than nothing, keeps closed slots, too, and so
        does one that has to be as wide as others (``alike``, ``together``) or as ``allowed``.
        """
        kept = open_.detach().to("cpu", torch.bool).clone()
        for number, sites in self._finely_read:
            kept[self.axes[number].slice] &= self._is_read(number, sites, kept)
        for number, switch in self.closing.items():
            if not kept[self.axes[number].slice].any():
                kept[self.axes[switch].start] = False
        for number in self._without_any(kept):
            if self.axes[number].kind != KIND:
                kept[self.axes[number].start] = True
        tables = self._tables
        for wide, narrow in self.wider:
            _widen(kept, tables[id(wide)], int(_alive(tables[id(narrow)], kept).sum()) + 1)
        self._align(kept)
        return kept

    def _without_any(self, kept: Tensor) -> list[int]:
        """Return the numbers of the axes without any kept slot."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])[self._bounds]
        numbers: list[int] = (before[1:] == before[:-1]).nonzero().flatten().tolist()
        return numbers

    @cached_property
    def _bounds(self) -> Tensor:
        """Start of each axis in the flat vector of all gates, and the end of the last one."""
        return torch.tensor([*(axis.start for axis in self.axes), self.size])

    @cached_property
    def closing(self) -> dict[int, int]:
        """Switch that closes once all slots of an axis are closed, both by number."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return {
            numbers[name]: numbers[branch.name]
            for branch in self.branches
            if branch.name in numbers
            for name in branch.closing
            if name in numbers
        }

    @cached_property
    def _finely_read(self) -> list[tuple[int, list[Site]]]:
        """Axes whose sites all read through a ``Gated`` layout, with these sites."""
        sites: dict[int, list[Site]] = defaultdict(list)
        for site in self.sites:
            for number in axes_of(site.layout):
                sites[number].append(site)
        # A write site represents readers without weights, which read every slot.
        return [
            (number, found)
            for number, found in sorted(sites.items())
            if all(site.role == "read" and isinstance(site.layout, Gated) for site in found)
        ]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the gated axes of each group of ``together``."""
        numbers = {name: number for number, name in enumerate(self.names)}
        found = (tuple(numbers[name] for name in of if name in numbers) for of in self.together)
        return tuple(of for of in found if of)

    @cached_property
    def equally_wide(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the axes that keep equally many slots: those of one size in one group."""
        sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for group, numbers in enumerate(self.groups):
            for number in numbers:
                sizes[group, self.axes[number].size].append(number)
        return tuple(tuple(of) for of in sizes.values() if len(of) > 1)

    @cached_property
    def limited(self) -> tuple[int, ...]:
        """Numbers of the axes with ``allowed`` widths, those that divide others last."""
        last = {each.axis for each in self.divisors}
        names = sorted(self.allowed.keys() & {*self.names}, key=lambda name: (name in last, name))
        return tuple(map(self.names.index, names))

    def least_allowed(self, number: int, kept: Tensor) -> int:
        """Return the smallest allowed width of an axis that is at least its width in ``kept``."""
        axis = self.axes[number]
        count, widths = int(kept[axis.slice].sum()), self.allowed[axis.name]
        for each in (each for each in self.divisors if each.axis == axis.name):
            others = (int(kept[o.slice].sum()) for o in self.axes if o.name == each.other)
            widths = each.among(widths, next(others, each.whole))
        return min((width for width in widths if width >= count), default=count) if count else 0

    def _align(self, kept: Tensor) -> None:
        """Keep closed slots until all of ``allowed``, ``together`` and ``alike`` hold; in place."""
        while True:
            before = kept.clone()
            for number in self.limited:
                self._open_first(kept, number, self.least_allowed(number, kept))
            for numbers in self.equally_wide:
                widest = max(int(kept[self.axes[number].slice].sum()) for number in numbers)
                for number in numbers:
                    self._open_first(kept, number, widest)
            for dims in self.alike:
                tables = [self._tables[id(dim)] for dim in dims]
                widest = max(int(_alive(table, kept).sum()) for table in tables)
                for table in tables:
                    _widen(kept, table, widest)
            if torch.equal(kept, before):
                return

    def pins_of(self, reasons: Mapping[int, str]) -> list[Pin]:
        """Return a pin for each dim that has one of these axes, by number, with its reason."""
        return [
            Pin(f"{name} dim {number}", reasons[axis])
            for name, dims in self.tensors.items()
            for number, dim in enumerate(dims)
            for axis in sorted(axes_of(dim) & reasons.keys())[:1]
        ]

    def held_whole(self) -> set[str]:
        """Return the names of axes that can lose no slot.

        They have to stay as wide as a dim without any axis, whose size is constant.
        """
        held = (dims for dims in self.alike if not all(map(axes_of, dims)))
        return {self.axes[n].name for dims in held for dim in dims for n in axes_of(dim)}

    def _open_first(self, kept: Tensor, number: int, count: int) -> None:
        """Keep the first closed slots of an axis until it keeps ``count``; in place."""
        axis = self.axes[number]
        closed = (~kept[axis.slice]).nonzero().flatten()
        kept[axis.start + closed[: max(0, count - axis.size + len(closed))]] = True

    @cached_property
    def _tables(self) -> dict[int, Tensor]:
        """Gate tables of the dims that depend on others' widths, by the layout's ``id``."""
        pairs = (*self.wider, *self.alike)
        return {id(dim): self.gate_table(dim) for dims in pairs for dim in dims}

    def _is_read(self, number: int, readers: Iterable[Site], kept: Tensor) -> Tensor:
        """Return the slots that any of ``readers`` still reads; bool, shape ``(axis size,)``."""
        axis = self.axes[number]
        read = torch.zeros(axis.size, dtype=torch.bool)
        ids = torch.zeros(self.size, dtype=torch.int64)
        ids[axis.slice] = torch.arange(axis.size)
        for site in readers:
            alive = self.mask(site.layout, kept)
            if isinstance(site.layout, Gated) and number in axes_of(site.layout.fine):
                index = self.spread(site.layout.fine, ids)
                read[index[alive]] = True
            else:
                index, present = self._positions(site.layout, number, ids)
                read[index[alive & present]] = True
        return read

    def _positions(self, layout: Layout, number: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """For each position: the slot of axis ``number`` there, and whether there is one."""
        base = layout.base if isinstance(layout, Gated) else layout
        alone = only(base, frozenset([number]))
        marks = torch.zeros(self.size, dtype=torch.int64)
        # Slot i carries the value i + 2; constants spread as ones, so 1 means "not this axis".
        marks[self.axes[number].slice] = ids[self.axes[number].slice] + 2
        found = self.spread(alone, marks)
        return (found - 2).clamp(min=0), found > 1

    def select(self, names: Collection[str]) -> Plan:
        """Return the plan with gates only on the named axes; the others stay whole."""
        wanted = [axis.name in names for axis in self.axes]
        if all(wanted):
            return self
        numbers: dict[int, int] = {}
        axes: list[Axis] = []
        for old, axis in enumerate(self.axes):
            if wanted[old]:
                numbers[old] = len(axes)
                axes.append(replace(axis, start=sum(a.size for a in axes)))

        def leaf(slots: Slots) -> Layout:
            if slots.axis not in numbers:
                return Const(slots.stop - slots.start)
            return Slots(numbers[slots.axis], slots.start, slots.stop)

        gone = {n for n, axis in enumerate(self.axes) if axis.kind == KIND and n not in numbers}

        def convert(layout: Layout) -> Layout:
            layout = without_factors(layout, gone)
            if isinstance(layout, Gated) and not axes_of(substitute(layout.fine, leaf)):
                layout = layout.base
            return substitute(layout, leaf)

        sites = (replace(site, layout=merged(convert(site.layout))) for site in self.sites)
        return self.mapped(axes, (site for site in sites if axes_of(site.layout)), convert)

    def narrowed(self, kept: Tensor) -> Plan:
        """Return the plan of the network that remains after slots are cut.

        Its gates remove from that network what the gates of this plan, with those of the cut
        slots closed, remove from the whole one. ``group_size`` keeps its original value.

        Args:
            kept: the slots that stay, bool, flat, with at least one of each axis; see ``kept``.

        Raises:
            UsageError: an axis loses all its slots.
        """
        for axis in self.axes:
            if not kept[axis.slice].any():
                raise UsageError(f"all slots of {axis.name} would be cut: one has to stay")
        sizes = [int(kept[axis.slice].sum()) for axis in self.axes]
        starts = accumulate(sizes, initial=0)
        axes = [
            replace(axis, start=start, size=size)
            for axis, start, size in zip(self.axes, starts, sizes, strict=False)
        ]

        def stays(layout: Layout) -> tuple[Layout, Tensor]:
            return narrowed(layout, lambda number: kept[self.axes[number].slice])

        def left(tensor: str, dim: int) -> Tensor:
            return self.mask(self.tensors[tensor][dim], kept)

        def site(of: Site) -> Site:
            # Gates of a layer may be fewer than those that cut it: all heads but not their sizes.
            return replace(of, layout=those(*stays(of.layout), left(of.tensor, of.dim)))

        result = self.mapped(axes, map(site, self.sites), lambda layout: stays(layout)[0])
        return replace(result, code=result.code.cut(left))

    def mapped(
        self, axes: Iterable[Axis], sites: Iterable[Site], convert: Callable[[Layout], Layout]
    ) -> Plan:
        """Return the plan on other axes and at other sites, with every other layout converted."""
        return replace(
            self,
            axes=tuple(axes),
            tensors={n: tuple(map(convert, dims)) for n, dims in self.tensors.items()},
            sites=tuple(sites),
            costs=tuple(replace(c, dims=tuple(map(convert, c.dims))) for c in self.costs),
            wider=tuple((convert(wide), convert(narrow)) for wide, narrow in self.wider),
            alike=tuple(tuple(map(convert, dims)) for dims in self.alike),
            code=self.code.map(convert),
            activations=tuple(each.map(convert) for each in self.activations),
        )

    def to_json(self) -> str:
        """The plan as a JSON text that ``Plan.from_json`` reads back."""
        return _JSON.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of ``to_json``.

        Raises:
            ValueError: the text is no plan.
        """
        try:
            return _JSON.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"this is no plan: {place} is missing or wrong") from error


_JSON = TypeAdapter(Plan)


def _alive(table: Tensor, kept: Tensor) -> Tensor:
    """Return which positions of a gate table are kept; bool."""
    return torch.cat([kept, kept.new_ones(1)])[table].all(0)


def _widen(kept: Tensor, table: Tensor, size: int) -> None:
    """Keep closed slots from a gate table's first positions on until ``size`` are; in place."""
    alive = _alive(table, kept)
    for position in (~alive).nonzero().flatten().tolist():
        if int(alive.sum()) >= size:
            return
        slots = table[:, position]
        kept[slots[slots < len(kept)]] = True
        alive = _alive(table, kept)
