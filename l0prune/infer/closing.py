"""Axes without which a branch is exactly nothing: they may close completely if it has a gate."""

from __future__ import annotations

from collections.abc import Collection

import torch

from l0prune.plan.branch import Branch
from l0prune.plan.layout import Layouts, axes_of
from l0prune.plan.needs import is_needed
from l0prune.plan.plan import Plan


def closing(plan: Plan, branch: Branch) -> tuple[str, ...]:
    """The names of the axes that only this branch needs, and without any of which it is zero.

    They are the part of a concatenation that it is, or all that it gives is multiplied with
    parameters that read them. A bias among these would still be added.
    """
    if not branch.tensors:
        return branch.axes if len(branch.axes) == 1 else ()
    tensors = [plan.tensors[name] for name in branch.tensors]
    shared = frozenset.intersection(*map(_axes, tensors))
    if not shared:
        return ()
    elsewhere = (cost.dims for cost in plan.costs if is_needed(cost.needed, [branch.name]))
    own = sorted(shared.difference(*map(_axes, elsewhere)))
    return tuple(plan.axes[number].name for number in own if _ends(plan, number, tensors))


def _ends(plan: Plan, number: int, tensors: Collection[Layouts]) -> bool:
    """Is nothing left of these tensors without this axis?"""
    left = torch.ones(plan.size, dtype=torch.bool)
    left[plan.axes[number].slice] = False
    return all(any(not plan.mask(dim, left).any() for dim in dims) for dims in tensors)


def _axes(dims: Layouts) -> frozenset[int]:
    return frozenset().union(*map(axes_of, dims))
