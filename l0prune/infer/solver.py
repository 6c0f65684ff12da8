"""A small type system for channels: expressions over axis variables, unified with refinement.

Every dim of every tensor in a graph has an expression. Where an operator ties two dims to each
other, their expressions are unified; where a product meets a concatenation or
another factorisation, variables are split until both sides agree. Sizes only shrink, so it ends.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import torch
from torch.fx import Node

from l0prune.plan.layout import Cat, Const, Pick, Prod, Term, children


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a variable is pinned, and the node that pinned it."""

    text: str
    node: Node | None


COPIES = "copies of a slot"


class Var:
    """An axis variable: ``size`` slots that live or die one by one.

    With ``copies`` all slots have equal values, so that the variable can be bound to any dim.
    """

    __slots__ = ("binding", "copies", "pin", "size")

    def __init__(self, size: int, *, copies: bool = False) -> None:
        self.size = size
        self.copies = copies
        self.binding: Expr | None = None
        self.pin: Reason | None = None


Expr: TypeAlias = "Term[Var]"
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
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


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
    return Prod(tuple(flat))


def pick(base: Expr, index: tuple[int, ...]) -> Expr:
    """Positions of ``base`` in normal form: no pick of a pick, none that changes nothing."""
    if isinstance(base, Const):
        return Const(len(index), base.what, base.is_input)
    if isinstance(base, Pick):
        return pick(base.base, tuple(base.index[i] for i in index))
    return base if index == tuple(range(base.size)) else Pick(base, index)


def _merge(a: Const, b: Const, size: int) -> Const:
    """Merge two constants; one of size 1 says nothing about what the positions are."""
    if a.size == 1 or b.size == 1:
        known = b if a.size == 1 else a
        return Const(size, known.what, known.is_input)
    both = a.is_input and b.is_input
    return Const(size, a.what if a.what == b.what or both else "a fixed dimension", both)


def picks(expr: Expr) -> Iterator[Pick[Var]]:
    """Yield the outermost picks in a resolved expression."""
    if isinstance(expr, Pick):
        yield expr
        return
    for child in children(expr):
        yield from picks(child)


def variables(expr: Expr) -> Iterator[Var]:
    """Return every variable in a resolved expression, left to right."""
    if isinstance(expr, Var):
        yield expr
    for child in children(expr):
        yield from variables(child)


_MOST = 1 << 17  # most positions that are enumerated one by one
Slot = tuple[Var, int]


@dataclass(frozen=True)
class MeetingSlots:
    """Ties between slots that follow from unifying two expressions.

    Attributes:
        groups: per group of tied variables the number of distinct slots, and for each variable
            the distinct slot that each of its slots becomes.
        fixed: variables of which a slot meets a constant, with the constant.
    """

    groups: list[tuple[int, dict[Var, tuple[int, ...]]]]
    fixed: dict[Var, Const]


def inverse(index: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inverse permutation."""
    back = [0] * len(index)
    for to, where in enumerate(index):
        back[where] = to
    return tuple(back)


def transposed(index: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
    """Return an order as a reshape with permuted dims: the sizes, and the permutation.

    ``(0, 3, 1, 4, 2, 5)`` is ``2 × 3`` transposed, so ``([2, 3], [1, 0])``; None for other orders.
    """
    left = index
    strides: list[int] = []
    sizes: list[int] = []
    while len(left) > 1:
        stride, run = left[1] - left[0], 2
        while run < len(left) and left[run] - left[run - 1] == stride:
            run += 1
        strides.insert(0, stride)
        sizes.insert(0, run)
        left = left[::run]
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    whole = [sizes[dim] for dim in order]
    if whole and math.prod(whole) == len(index):
        places = torch.arange(len(index)).reshape(whole)
        back = [order.index(dim) for dim in range(len(sizes))]
        if places.permute(back).flatten().tolist() == list(index):
            return whole, back
    return None


def slots_that_meet(a: Expr, b: Expr) -> MeetingSlots | None:
    """Return the ties between slots of two expressions; None where a position has several."""
    left, right = _slots(a), _slots(b)
    if left is None or right is None:
        return None
    parents: dict[Slot, Slot] = {}
    fixed: dict[Var, Const] = {}
    for one, other in zip(left, right, strict=True):
        if isinstance(one, Const) or isinstance(other, Const):
            const, slot = (one, other) if isinstance(one, Const) else (other, one)
            if isinstance(const, Const) and not isinstance(slot, Const):
                fixed.setdefault(slot[0], const)
        else:
            parents[_root(parents, one)] = _root(parents, other)
    return MeetingSlots(_groups(parents), fixed)


def _slots(expr: Expr) -> list[Slot | Const] | None:
    """Return for each position its slot or constant; None where a position has several slots."""
    if expr.size > _MOST:
        return None
    match expr:
        case Const():
            return [expr] * expr.size
        case Var():
            return [(expr, slot) for slot in range(expr.size)]
        case Pick(base, index):
            slots = _slots(base)
            return None if slots is None else [slots[i] for i in index]
        case Cat(parts):
            every = [_slots(part) for part in parts]
            return None if None in every else [slot for part in every for slot in part or ()]
        case Prod(factors):
            nested = [_slots(factor) for factor in factors]
            found = [_only_slot(several) for several in product(*(f or () for f in nested))]
            return None if None in nested or None in found else [f for f in found if f is not None]


def _only_slot(several: tuple[Slot | Const, ...]) -> Slot | Const | None:
    """Return the only slot of a position in a product, else its constant; None for several."""
    slots = [each for each in several if not isinstance(each, Const)]
    return None if len(slots) > 1 else (*slots, *several)[0]


def _root(parents: dict[Slot, Slot], slot: Slot) -> Slot:
    """Return the union-find representative of a slot."""
    while parents.setdefault(slot, slot) != slot:
        parents[slot] = slot = parents[parents[slot]]
    return slot


def _groups(parents: dict[Slot, Slot]) -> list[tuple[int, dict[Var, tuple[int, ...]]]]:
    """Return the groups of variables with tied slots; see ``MeetingSlots``."""
    every = dict.fromkeys(var for var, _ in parents)
    roots = {var: [_root(parents, (var, slot)) for slot in range(var.size)] for var in every}
    together: dict[Var, set[Var]] = {var: {var} for var in every}
    by_root: dict[Slot, Var] = {}
    for var, of in roots.items():
        for root in of:
            one, other = together[by_root.setdefault(root, var)], together[var]
            if one is not other:
                one |= other
                together |= dict.fromkeys(one, one)
    groups = []
    for connected in {id(each): each for each in together.values()}.values():
        ordered = [var for var in roots if var in connected]
        distinct = dict.fromkeys(root for var in ordered for root in roots[var])
        numbers = {root: number for number, root in enumerate(distinct)}
        classes = {var: tuple(numbers[root] for root in roots[var]) for var in ordered}
        if len(ordered) > 1 or len(numbers) < ordered[0].size:
            groups.append((len(numbers), classes))
    return groups


class Solver:
    """Union-find over axis variables, with substitution of refined ones."""

    def __init__(self) -> None:
        self.node: Node | None = None  # the node that is being inferred: new pins name it

    def fresh(self, size: int) -> Expr:
        """A new variable; a single slot can never be cut, so it is a constant."""
        return Var(size) if size > 1 else Const(size, "a single slot")

    def resolve(self, expr: Expr) -> Expr:
        """The expression with every refined variable substituted, in normal form."""
        match expr:
            case Var(binding=None) | Const():
                return expr
            case Var():
                chain, end = [expr], expr.binding
                while isinstance(end, Var) and end.binding is not None:
                    chain.append(end)  # a loop: a deep network's chains are longer than the stack
                    end = end.binding
                assert end is not None
                found = self.resolve(end)
                for var in chain:
                    var.binding = found
                return found
            case Cat(parts):
                news = self._flat(parts)
                same = len(news) == len(parts) and all(map(operator.is_, news, parts))
                return expr if same else cat(news)
            case Prod(factors):
                news = [self.resolve(f) for f in factors]
                same = all(a is b for a, b in zip(news, factors, strict=True))
                return expr if same else prod(news)
            case Pick(base, index):
                new = self.resolve(base)
                return expr if new is base else pick(new, index)

    def _flat(self, parts: Iterable[Expr]) -> list[Expr]:
        """Return resolved parts of a concatenation, those of inner concatenations in their place.

        A loop: where a dim meets itself shifted by one, its parts are nested as deep as it is long.
        """
        found, waiting = [], list(parts)[::-1]
        while waiting:
            part = waiting.pop()
            while isinstance(part, Var) and part.binding is not None:
                part = part.binding
            if isinstance(part, Cat):
                waiting += part.parts[::-1]
            else:
                found.append(self.resolve(part))
        return found

    def pin(self, expr: Expr, text: str) -> None:
        """Forbid cutting any variable of the expression, for the reason given."""
        self._pin(expr, Reason(text, self.node))

    def _pin(self, expr: Expr, reason: Reason) -> None:
        for var in variables(self.resolve(expr)):
            var.pin = var.pin or reason

    def unify(self, a: Expr, b: Expr) -> None:
        """Unify two dims: slot i of one lives or dies with slot i of the other."""
        a, b = self.resolve(a), self.resolve(b)
        if a is b:
            return
        if a.size != b.size:
            for expr in (a, b):
                self.pin(expr, "its size does not match what it is combined with")
        elif isinstance(a, Var) and a.copies:
            self._bind(a, b)
        elif isinstance(b, Var) and b.copies:
            self._bind(b, a)
        elif isinstance(a, Const) or isinstance(b, Const):
            const, other = (a, b) if isinstance(a, Const) else (b, a)
            self.pin(other, f"it meets {const.what}")  # type: ignore[union-attr]
        elif isinstance(a, Var):
            self._bind(a, b)
        elif isinstance(b, Var):
            self._bind(b, a)
        elif isinstance(a, Cat) or isinstance(b, Cat):
            self._unify_parts([a], [b])
        elif isinstance(a, Prod) and isinstance(b, Prod):
            self._unify_factors(list(a.factors), list(b.factors))
        else:
            self._unify_picked(a, b)

    def _unify_picked(self, a: Expr, b: Expr) -> None:
        """Unify a reordered expression with a product, or with another reordered one."""
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Pick) and one.is_order and isinstance(one.base, Var):
                self._bind(one.base, pick(other, inverse(one.index)))
                return
        for one, other in ((a, b), (b, a)):
            if not (isinstance(one, Pick) and one.is_order and isinstance(one.base, Prod)):
                continue
            view = transposed(one.index)
            if view is not None:
                factors = self.regroup([one.base], view[0])
                self.unify(prod([factors[dim] for dim in view[1]]), other)
                return
        self._tie(a, b)

    def _tie(self, a: Expr, b: Expr) -> None:
        """Unify position by position: slots that meet become one."""
        met = slots_that_meet(a, b)
        if met is None:
            for expr in (a, b):
                self.pin(expr, "its slots are put in another order across a reshape")
            return
        for var, const in met.fixed.items():
            self.pin(var, f"it meets {const.what}")
        for sizes, classes in met.groups:
            # one slot for all of them can never be cut
            new = (
                Var(sizes) if sizes > 1 else Const(1, "a slot tied to every other one of its axis")
            )
            for var, index in classes.items():
                self._bind(var, pick(new, index))

    def _bind(self, var: Var, expr: Expr) -> None:
        if any(var is other for other in variables(expr)):
            self._tie(var, expr)
            return
        var.binding = expr
        if var.pin:
            self._pin(expr, var.pin)

    def _unify_parts(self, left: list[Expr], right: list[Expr]) -> None:
        """Unify two concatenations, splitting whichever part is the longer one."""
        while left and right:
            for side in (left, right):
                first = self.resolve(side[0])
                side[:1] = first.parts if isinstance(first, Cat) else [first]
            a, b = left[0], right[0]
            if a.size > b.size:
                left[:1] = self.split(a, b.size)
            elif b.size > a.size:
                right[:1] = self.split(b, a.size)
            else:
                del left[0], right[0]
                self.unify(a, b)

    def _unify_factors(self, left: list[Expr], right: list[Expr]) -> None:
        """Unify two products, factorising whichever leading factor is the larger one."""
        while left and right:
            a, b = self.resolve(left[0]), self.resolve(right[0])
            if a.size == b.size:
                del left[0], right[0]
                self.unify(a, b)
            elif a.size % b.size == 0:
                left[:1] = self.factor(a, b.size)
            elif b.size % a.size == 0:
                right[:1] = self.factor(b, a.size)
            else:
                for expr in (*left, *right):
                    self.pin(expr, "it is reshaped across its slots")
                return

    def factor(self, expr: Expr, outer: int) -> list[Expr]:
        """The expression as a product of ``outer`` × the rest, refining it where needed."""
        expr = self.resolve(expr)
        inner = expr.size // outer
        if isinstance(expr, Const):
            return [
                Const(outer, expr.what, expr.is_input),
                Const(inner, expr.what, expr.is_input),
            ]
        pair = [self.fresh(outer), self.fresh(inner)]
        self.unify(expr, prod(pair))
        return [self.resolve(part) for part in pair]

    def split(self, expr: Expr, at: int) -> list[Expr]:
        """The expression as the concatenation of its first ``at`` positions and the rest."""
        expr = self.resolve(expr)
        if at in (0, expr.size):
            empty: Expr = Const(0)
            return [empty, expr] if at == 0 else [expr, empty]
        match expr:
            case Const(size, what, is_input):
                return [Const(at, what, is_input), Const(size - at, what, is_input)]
            case Var(size=size):
                pair = [self.fresh(at), self.fresh(size - at)]
                self._bind(expr, cat(pair))
                return pair
            case Cat(parts):
                return self._split_parts(parts, at)
            case Prod(factors):
                return self._split_product(factors, at)
            case Pick(base, index):
                if 1 in (at, len(index) - at):
                    self.pin(base, SINGLE)
                return [pick(base, index[:at]), pick(base, index[at:])]

    def _split_parts(self, parts: tuple[Expr, ...], at: int) -> list[Expr]:
        before = 0
        for number, part in enumerate(parts):
            if before + part.size >= at:
                left, right = self.split(part, at - before)
                return [cat((*parts[:number], left)), cat((right, *parts[number + 1 :]))]
            before += part.size
        raise AssertionError("split beyond the end")

    def _split_product(self, factors: tuple[Expr, ...], at: int) -> list[Expr]:
        lead, rest = factors[0], prod(factors[1:])
        whole, part = divmod(at, rest.size)
        if not part:
            left, right = self.split(lead, whole)
            return [prod((left, rest)), prod((right, rest))]
        # The cut goes through the inside of one repetition: the outer factor must stay whole.
        self.pin(lead, "it is cut at a place that is no multiple of its inner dimension")
        for var in variables(lead):
            var.binding = Const(var.size)
        inner_left, inner_right = self.split(rest, part)
        after = lead.size - whole - 1
        return [
            cat((prod((Const(whole), rest)) if whole else Const(0), inner_left)),
            cat((inner_right, prod((Const(after), rest)) if after else Const(0))),
        ]

    def regroup(self, dims: list[Expr], sizes: list[int]) -> list[Expr]:
        """The dims after a row-major reshape to ``sizes``."""
        out: list[Expr] = []
        sources, targets = list(dims), list(sizes)
        while sources or targets:
            group, wanted = _take_group(sources, targets)
            whole = prod([self.resolve(d) for d in group])
            if len(wanted) == 1:
                out.append(whole)
            elif isinstance(whole, Const):
                out += [Const(size, whole.what, whole.is_input) for size in wanted]
            else:
                fresh = [self.fresh(size) for size in wanted]
                self.unify(whole, prod(fresh))
                out += fresh
        return out


def _take_group(sources: list[Expr], targets: list[int]) -> tuple[list[Expr], list[int]]:
    """Remove from both lists the shortest leading dims with the same number of positions."""
    group = [sources.pop(0)] if sources else []
    wanted = [targets.pop(0)] if targets else []
    have, want = math.prod(d.size for d in group), math.prod(wanted)
    while have != want:
        if have < want and sources:
            group.append(sources.pop(0))
            have *= group[-1].size
        elif targets:
            wanted.append(targets.pop(0))
            want *= wanted[-1]
        else:
            group += sources
            sources.clear()
            break
    return group, wanted
