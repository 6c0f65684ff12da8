"""Two expressions over the same positions, one by one: which slots meet which."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeGuard

import torch

from l0prune.infer.expressions import Cat, Const, Expr, Pick, Prod, Var

_MOST = 1 << 17  # positions that are looked at one by one, at most
Slot = tuple[Var, int]


@dataclass(frozen=True)
class Meetings:
    """What follows where two expressions are one.

    Attributes:
        groups: for slots that meet one another how many are left, and for each of their variables
            which of those each of its slots is.
        fixed: variables of which a slot meets a constant, with the constant.
    """

    groups: list[tuple[int, dict[Var, tuple[int, ...]]]]
    fixed: dict[Var, Const]


def is_order(expr: Expr) -> TypeGuard[Pick]:
    """Is it all positions of something, each once, in another order?"""
    return isinstance(expr, Pick) and sorted(expr.index) == list(range(expr.base.size))


def inverse(index: tuple[int, ...]) -> tuple[int, ...]:
    """What undoes an order."""
    back = [0] * len(index)
    for to, where in enumerate(index):
        back[where] = to
    return tuple(back)


def transposed(index: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
    """The order as a reshape whose dims are permuted: its sizes, and which of them comes where.

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
    if whole and prod(whole) == len(index):
        places = torch.arange(len(index)).reshape(whole)
        back = [order.index(dim) for dim in range(len(sizes))]
        if places.permute(back).flatten().tolist() == list(index):
            return whole, back
    return None


def meetings(a: Expr, b: Expr) -> Meetings | None:
    """Which slots of two resolved expressions meet; None where a position has several slots."""
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
    return Meetings(_groups(parents), fixed)


def _slots(expr: Expr) -> list[Slot | Const] | None:
    """For each position its slot, or the constant that it is part of."""
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
        case Cat(parts, _):
            every = [_slots(part) for part in parts]
            return None if None in every else [slot for part in every for slot in part or ()]
        case Prod(factors, _):
            nested = [_slots(factor) for factor in factors]
            found = [_only_slot(several) for several in product(*(f or () for f in nested))]
            return None if None in nested or None in found else [f for f in found if f is not None]


def _only_slot(several: tuple[Slot | Const, ...]) -> Slot | Const | None:
    """The one slot of a position in a product; None if there are more."""
    slots = [each for each in several if not isinstance(each, Const)]
    return None if len(slots) > 1 else (*slots, *several)[0]


def _root(parents: dict[Slot, Slot], slot: Slot) -> Slot:
    """The slot that stands for all that it meets."""
    while parents.setdefault(slot, slot) != slot:
        parents[slot] = slot = parents[parents[slot]]
    return slot


def _groups(parents: dict[Slot, Slot]) -> list[tuple[int, dict[Var, tuple[int, ...]]]]:
    """Variables whose slots meet, with what each slot becomes."""
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
