"""What the slots along a dim are: expressions over axis variables, in normal form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod as product

from torch.fx import Node


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a variable is pinned, and the node that pinned it."""

    text: str
    node: Node | None


COPIES = "copies of a slot"


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """``size`` positions that are no axis: batch, height, time, an image's colours."""

    size: int
    what: str = "a fixed dimension"
    is_input: bool = False


class Var:
    """An axis variable: ``size`` slots that live or die one by one.

    Of ``copies`` all slots are alike, so that they can be those of whatever dim they meet.
    """

    __slots__ = ("binding", "copies", "pin", "size")

    def __init__(self, size: int, *, copies: bool = False) -> None:
        self.size = size
        self.copies = copies
        self.binding: Expr | None = None
        self.pin: Reason | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cat:
    """``parts``, one after another."""

    parts: tuple[Expr, ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Prod:
    """``factors`` nested in row-major order: the last varies fastest."""

    factors: tuple[Expr, ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """Position ``index[i]`` of ``base`` at i: in another order, left out or several times."""

    base: Expr
    index: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(self.index)


Expr = Const | Var | Cat | Prod | Pick
SINGLE = "single positions are picked out of it"


def cat(parts: Iterable[Expr]) -> Expr:
    """A concatenation in normal form: flat, neighbouring constants merged."""
    flat: list[Expr] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Cat) else (part,):
            last = flat[-1] if flat else None
            if isinstance(piece, Const) and isinstance(last, Const):
                flat[-1] = _merge(last, piece, last.size + piece.size)
            elif piece.size:
                flat.append(piece)
    if not flat:
        return Const(0)
    return flat[0] if len(flat) == 1 else Cat(tuple(flat), sum(p.size for p in flat))


def prod(factors: Iterable[Expr]) -> Expr:
    """A product in normal form: flat, without ones, a leading concatenation distributed."""
    flat: list[Expr] = []
    for factor in factors:
        for piece in factor.factors if isinstance(factor, Prod) else (factor,):
            last = flat[-1] if flat else None
            if isinstance(piece, Const) and isinstance(last, Const):
                flat[-1] = _merge(last, piece, last.size * piece.size)
            else:
                flat.append(piece)
    flat = [f for f in flat if f.size != 1] or flat[:1]
    if not flat:
        return Const(1)
    if len(flat) == 1:
        return flat[0]
    if isinstance(flat[0], Cat):
        return cat(prod((part, *flat[1:])) for part in flat[0].parts)
    return Prod(tuple(flat), product(f.size for f in flat))


def pick(base: Expr, index: tuple[int, ...]) -> Expr:
    """Positions of ``base`` in normal form: no pick of a pick, none that changes nothing."""
    if isinstance(base, Const):
        return Const(len(index), base.what, base.is_input)
    if isinstance(base, Pick):
        return pick(base.base, tuple(base.index[i] for i in index))
    return base if index == tuple(range(base.size)) else Pick(base, index)


def _merge(a: Const, b: Const, size: int) -> Const:
    """Two constants as one; ones say nothing about what the positions are."""
    if a.size == 1 or b.size == 1:
        known = b if a.size == 1 else a
        return Const(size, known.what, known.is_input)
    both = a.is_input and b.is_input
    return Const(size, a.what if a.what == b.what or both else "a fixed dimension", both)


def picks(expr: Expr) -> Iterator[Pick]:
    """Every pick in a resolved expression."""
    match expr:
        case Cat(inner, _) | Prod(inner, _):
            for each in inner:
                yield from picks(each)
        case Pick():
            yield expr


def variables(expr: Expr) -> Iterator[Var]:
    """Every variable in a resolved expression, left to right."""
    match expr:
        case Var():
            yield expr
        case Cat(parts, _):
            for part in parts:
                yield from variables(part)
        case Prod(factors, _):
            for factor in factors:
                yield from variables(factor)
        case Pick(base, _):
            yield from variables(base)
