"""Switches: one gate for a whole branch, beside the gates of the slots in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from l0prune.plan.branch import KIND
from l0prune.plan.layout import Both, Const, Layout, Prod, Slots, size_of
from l0prune.plan.needs import in_switches
from l0prune.plan.plan import Axis, Plan, Site


def switched(plan: Plan, names: Collection[str]) -> Plan:
    """The same plan with a switch on each branch of these names: an axis with one slot.

    The branch is multiplied by it, and whatever is needed for some branches costs what it did times
    the probability that the switches of one of them are open.
    """
    found = [branch for branch in plan.branches if branch.name in names]
    if not found:
        return plan
    first, start = len(plan.axes), plan.size
    axes = tuple(
        Axis(branch.name, KIND, 1, start + number, max(branch.size, 1))
        for number, branch in enumerate(found)
    )
    numbers = {branch.name: first + number for number, branch in enumerate(found)}
    sites = {(site.tensor, site.dim): site for site in plan.sites}
    for branch in found:
        for tensor in branch.tensors:
            site = _site(plan, sites, tensor)
            under = Prod((switch(numbers[branch.name]), site.layout))
            sites[site.tensor, site.dim] = replace(site, layout=under)
    costs = []
    for cost in plan.costs:
        for switches, sign in in_switches(cost.needed, numbers).items():
            dims = (*cost.dims, *map(switch, sorted(switches)))
            costs.append(replace(cost, scale=sign * cost.scale, dims=dims))
    sites_now = tuple(sites.values())
    return replace(plan, axes=(*plan.axes, *axes), sites=sites_now, costs=tuple(costs))


def switch(number: int) -> Layout:
    """The layout of the axis of this number, which is a switch."""
    return Slots(number, 0, 1)


def _site(plan: Plan, sites: dict[tuple[str, int], Site], tensor: str) -> Site:
    """Where a parameter is multiplied: along a dim in which no single inputs are."""
    dims = plan.tensors[tensor]
    taken = (sites.get((tensor, dim)) for dim in range(len(dims)))
    dim = next(i for i, s in enumerate(taken) if s is None or not isinstance(s.layout, Both))
    return sites.get((tensor, dim)) or Site(tensor, dim, Const(size_of(dims[dim])), "write")


def gone(plan: Plan, kept: Tensor) -> list[str]:
    """The names of the branches whose switches are not among the slots that stay."""
    return [a.name for a in plan.axes if a.kind == KIND and not bool(kept[a.start])]


def with_all_branches(plan: Plan, kept: Tensor) -> Tensor:
    """The slots that stay where every branch has to: its switch multiplies it by zero there."""
    return kept | switches_of(plan)


def switches_of(plan: Plan) -> Tensor:
    """Which gates are switches: bool, shape ``(plan.size,)``."""
    result = torch.zeros(plan.size, dtype=torch.bool)
    for axis in plan.axes:
        result[axis.slice] = axis.kind == KIND
    return result


def switches_by_module(plan: Plan) -> dict[str, tuple[int, ...]]:
    """By path of a module, the numbers of the axes that switch all of its work off."""
    numbers = {axis.name: number for number, axis in enumerate(plan.axes) if axis.kind == KIND}
    found: dict[str, tuple[int, ...]] = {}
    for branch in plan.branches:
        for path in branch.modules if branch.name in numbers else ():
            found[path] = (*found.get(path, ()), numbers[branch.name])
    return found
