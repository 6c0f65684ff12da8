"""Layouts: the meaning of the positions along one dimension of a tensor, in slots of axes.

A layout reads like einops. ``Slots`` names slots of an axis, ``Const`` a dimension that is no
axis (batch, height, time); ``Cat`` puts layouts one after another, ``Prod`` nests them in
row-major order, ``Pick`` takes positions of a layout in any order, and ``Gated`` lays a second,
finer axis over a layout, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor


class Leaf(Protocol):
    """A term without children: slots of an axis, or a variable of the solver."""

    @property
    def size(self) -> int:
        """Number of positions."""


L = TypeVar("L", bound=Leaf, covariant=True)


@dataclass(frozen=True, slots=True)
class Const:
    """``size`` positions that belong to no axis: batch, height, time, an image's colours.

    ``what`` (for messages) and ``is_input`` (of the model) are neither compared nor serialized.
    """

    size: int
    what: str = field(default="a fixed dimension", compare=False, repr=False)
    is_input: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots ``start`` to ``stop`` (exclusive) of axis number ``axis`` of a plan."""

    axis: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Cat(Generic[L]):
    """``parts``, one after another."""

    parts: tuple[Term[L], ...]
    size: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum([part.size for part in self.parts]))


@dataclass(frozen=True, slots=True)
class Prod(Generic[L]):
    """``factors`` nested in row-major order: the last one varies fastest."""

    factors: tuple[Term[L], ...]
    size: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", prod([factor.size for factor in self.factors]))


@dataclass(frozen=True, slots=True)
class Pick(Generic[L]):
    """Positions of ``base`` by index: reordered, left out or repeated."""

    base: Term[L]
    index: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(self.index)

    @property
    def is_order(self) -> bool:
        """Return whether each position of the base occurs once, so that they are only reordered."""
        return sorted(self.index) == list(range(self.base.size))


@dataclass(frozen=True, slots=True)
class Gated:
    """Layout with a separate gate per position: alive where ``base`` and ``fine`` both are."""

    base: Layout
    fine: Layout

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.base.size


# Layout of a dim: over the solver's variables during inference, over slots of axes in a plan.
Term: TypeAlias = "Const | L | Cat[L] | Prod[L] | Pick[L]"


def picked(base: Layout, index: tuple[int, ...]) -> Layout:
    """Return these positions of ``base``; a constant if ``base`` has no axis."""
    return Pick(base, index) if axes_of(base) else Const(len(index))


def children(term: Term[Any]) -> tuple[Any, ...]:
    """Return the direct children of a term."""
    match term:
        case Cat(parts):
            return parts
        case Prod(factors):
            return factors
        case Gated(base, fine):
            return (base, fine)
        case Pick(base, _):
            return (base,)
        case _:
            return ()


def leaves(layout: Layout) -> Iterator[Slots]:
    """Every ``Slots`` in the layout, left to right."""
    if isinstance(layout, Slots):
        yield layout
    for child in children(layout):
        yield from leaves(child)


def axes_of(layout: Layout) -> frozenset[int]:
    """Numbers of the axes that occur in the layout."""
    return frozenset(leaf.axis for leaf in leaves(layout))


def substitute(term: Term[Any], leaf: Callable[[Any], Layout]) -> Layout:
    """Replace each leaf of a term that is not a constant by ``leaf(part)``."""
    if isinstance(term, Const | Cat | Prod | Gated | Pick):
        return with_children(term, lambda child: substitute(child, leaf))
    return leaf(term)


def with_children(layout: Term[Any], convert: Callable[[Any], Layout]) -> Layout:
    """Return the layout with ``convert`` applied to each direct child."""
    match layout:
        case Cat(parts):
            return Cat(tuple(map(convert, parts)))
        case Prod(factors):
            return Prod(tuple(map(convert, factors)))
        case Gated(base, fine):
            return Gated(convert(base), convert(fine))
        case Pick(base, index):
            return picked(convert(base), index)
        case _:
            return layout


def only(layout: Layout, axes: frozenset[int]) -> Layout:
    """The layout with every axis that is not in ``axes`` made constant."""
    return substitute(layout, lambda s: s if s.axis in axes else Const(s.size))


def merged(layout: Layout) -> Layout:
    """Make each part of the layout without slots one constant."""
    if not axes_of(layout):
        return Const(layout.size)
    return with_children(layout, merged)


def without_factors(layout: Layout, axes: Collection[int]) -> Layout:
    """Remove the factors that are slots of these axes from every product of the layout."""
    if isinstance(layout, Prod):
        left = tuple(f for f in layout.factors if not (isinstance(f, Slots) and f.axis in axes))
        if len(left) == 1 < len(layout.factors):
            return without_factors(left[0], axes)
        layout = Prod(left)
    return with_children(layout, lambda child: without_factors(child, axes))


def show(layout: Layout, names: Sequence[str]) -> str:
    """The layout as text, einops-like: ``conv1 + conv2×49``; ``·`` marks a constant."""
    match layout:
        case Const(size):
            return "1" if size == 1 else f"·{size}"
        case Slots(axis, start, stop):
            return names[axis] if start == 0 else f"{names[axis]}[{start}:{stop}]"
        case Cat(parts):
            return " + ".join(show(part, names) for part in parts)
        case Prod(factors):
            texts = [show(f, names) for f in factors]
            pairs = zip(factors, texts, strict=True)
            return "×".join(f"({t})" if isinstance(f, Cat) else t for f, t in pairs)
        case Gated(_, fine):
            return show(fine, names)
        case Pick(base, _):
            return f"({show(base, names)})[…]"


def to_json(layout: Layout) -> Any:
    """The layout as plain lists and numbers; ``from_json`` reads it back."""
    match layout:
        case Const(size):
            return size
        case Slots(axis, start, stop):
            return ["slots", axis, start, stop]
        case Cat(parts):
            return ["cat", *map(to_json, parts)]
        case Prod(factors):
            return ["prod", *map(to_json, factors)]
        case Gated(base, fine):
            return ["gated", to_json(base), to_json(fine)]
        case Pick(base, index):
            return ["pick", to_json(base), list(index)]


def from_json(data: Any) -> Layout:
    """Inverse of ``to_json``.

    Raises:
        ValueError: the data is no layout.
    """
    match data:
        case int(size):
            return Const(size)
        case ["slots", int(axis), int(start), int(stop)]:
            return Slots(axis, start, stop)
        case ["cat", *parts]:
            return Cat(tuple(map(from_json, parts)))
        case ["prod", *factors]:
            return Prod(tuple(map(from_json, factors)))
        case ["gated", base, fine]:
            return Gated(from_json(base), from_json(fine))
        case ["pick", base, [*index]] if _are_positions(index, from_json(base).size):
            return Pick(from_json(base), tuple(index))
        case _:
            raise ValueError(f"not a layout: {data!r}")


def _are_positions(index: Sequence[Any], size: int) -> bool:
    return all(type(i) is int and 0 <= i < size for i in index)


if TYPE_CHECKING:
    Layout: TypeAlias = "Term[Slots | Gated]"
else:  # for pydantic, which reads and writes the dataclasses that hold layouts
    Layout = Annotated[Any, PlainValidator(from_json), PlainSerializer(to_json)]
Layouts: TypeAlias = tuple[Layout, ...]


def outer(layout: Layout, size: int) -> Layout:
    """Return the leading factors with ``size`` positions: the groups of groups × channels."""
    match layout:
        case Cat(parts):
            whole = layout.size
            return Cat(tuple(outer(part, size * part.size // whole) for part in parts))
        case Prod(factors):
            count, taken = 1, []
            for factor in factors:
                if count == size:
                    break
                taken.append(factor)
                count *= factor.size
            return Prod(tuple(taken)) if count == size else Const(size)
        case _:
            return layout if layout.size == size else Const(size)


def gate_table(layout: Layout, flat: Callable[[Slots], slice], one: int) -> Tensor:
    """Return the entries of the flat gate vector that multiply at each position.

    ``flat`` gives the range of slots in that vector, ``one`` is the index that means no gate.

    Shape: ``(factors, layout.size)``, int64; no rows where the layout has no axis.
    """

    def table(of: Layout) -> Tensor:
        match of:
            case Const(size):
                return torch.empty(0, size, dtype=torch.int64)
            case Slots():
                place = flat(of)
                return torch.arange(place.start, place.stop).unsqueeze(0)
            case Gated(base, fine):
                return torch.cat([table(base), table(fine)])
            case Cat(parts):
                return _side_by_side(list(map(table, parts)), one)
            case Prod(factors):
                return _nested(list(map(table, factors)))
            case Pick(base, index):
                return table(base)[:, torch.tensor(index, dtype=torch.int64)]

    return table(layout)


def constant_positions(layout: Layout) -> int:
    """Count the positions along the dimension that no gate can remove."""
    match layout:
        case Const(size):
            return size
        case Slots():
            return 0
        case Cat(parts):
            return sum(map(constant_positions, parts))
        case Prod(factors):
            return prod(map(constant_positions, factors))
        case Gated() | Pick():
            table = gate_table(layout, lambda slots: slice(slots.start, slots.stop), one=-1)
            return int((table < 0).all(0).sum())


def _side_by_side(tables: list[Tensor], one: int) -> Tensor:
    """Concatenate along positions, padding with ``one`` to the deepest table."""
    depth = max((table.shape[0] for table in tables), default=0)
    return torch.cat(
        [
            torch.cat([table, table.new_full((depth - table.shape[0], table.shape[1]), one)])
            for table in tables
        ],
        dim=1,
    )


def _nested(tables: list[Tensor]) -> Tensor:
    """Row-major product: each position of the result meets one position of every table."""
    result = torch.empty(0, 1, dtype=torch.int64)
    for table in tables:
        outer, inner = result.shape[1], table.shape[1]
        result = torch.cat([result.repeat_interleave(inner, dim=1), table.repeat(1, outer)])
    return result


def distinct(gates: Tensor, one: int) -> Tensor:
    """Each row's gates with repetitions replaced by ``one``; shape ``(rows, gates)``."""
    ordered = gates.sort(dim=1).values
    repeated = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:] = torch.where(repeated, one, ordered[:, 1:])
    return ordered
