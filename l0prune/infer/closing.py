"""Axes without which a branch is exactly nothing: they may close completely if it has a gate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from l0prune.plan.branch import Branch
from l0prune.plan.layout import Layouts, axes_of
from l0prune.plan.needs import vital
from l0prune.plan.plan import Plan


def closing(plan: Plan) -> Iterator[Branch]:
    """The branches of a plan, each with its closing axes.

    They are those that only the branch needs, and without any of which it is zero: the part of a
    concatenation that it is, or all that it gives is multiplied with parameters that read them. A
    bias among these would still be added.
    """
    users: dict[int, list[frozenset[str]]] = defaultdict(list)  # by axis, when it is needed
    for cost in plan.costs:
        for number in _axes(cost.dims):
            users[number] += map(frozenset, cost.needed)
    only = {number: vital(needed) for number, needed in users.items()}
    for branch in plan.branches:
        yield replace(branch, closing=tuple(_of(plan, branch, only)))


def _of(plan: Plan, branch: Branch, only: Mapping[int, frozenset[str]]) -> Iterator[str]:
    if not branch.tensors:
        yield from branch.axes if len(branch.axes) == 1 else ()
        return
    tensors = [plan.tensors[name] for name in branch.tensors]
    shared = frozenset.intersection(*map(_axes, tensors))
    for number in sorted(shared):
        axis = plan.axes[number]
        if branch.name in only.get(number, ()) and _ends(plan, number, tensors):
            yield from () if axis.keeps_one else (axis.name,)


def _ends(plan: Plan, number: int, tensors: Collection[Layouts]) -> bool:
    """Is nothing left of these tensors without this axis?"""
    left = torch.ones(plan.size, dtype=torch.bool)
    left[plan.axes[number].slice] = False
    return all(any(not plan.mask(dim, left).any() for dim in dims) for dims in tensors)


def _axes(dims: Layouts) -> frozenset[int]:
    return frozenset().union(*map(axes_of, dims))
