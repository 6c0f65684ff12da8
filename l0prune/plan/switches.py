"""Switches: one gate for a whole branch, beside the gates of the slots in it.

A branch that is added to a stream is multiplied by its switch; the slots of a concatenated branch
are alive if both their gates and the switch are open, wherever they occur.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from l0prune.plan.branch import KIND, in_switches, is_needed
from l0prune.plan.layout import (
    Cat,
    Const,
    Gated,
    Layout,
    Prod,
    Slots,
    children,
    substitute,
    without_factors,
)
from l0prune.plan.plan import Axis, Plan, Site


def switched(plan: Plan, names: Collection[str]) -> Plan:
    """Return the plan with a switch, an axis of one slot, on each branch of these names.

    A cost that only some branches need is multiplied by the probability that all switches of one
    of its groups are open. A branch with axes that the plan lacks gets no switch.
    """
    there = set(plan.names)
    found = [each for each in plan.branches if each.name in names and there.issuperset(each.axes)]
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
            layout: Layout = Prod((switch(numbers[branch.name]), site.layout))
            sites[site.tensor, site.dim] = replace(site, layout=layout)
    costs = []
    for cost in plan.costs:
        for switches, sign in in_switches(cost.needed, numbers).items():
            dims = (*cost.dims, *map(switch, sorted(switches)))
            costs.append(replace(cost, scale=sign * cost.scale, dims=dims))
    result = replace(plan, axes=(*plan.axes, *axes), costs=tuple(costs))
    convert = under_switches(result)
    under = (replace(site, layout=convert(site.layout)) for site in sites.values())
    return result.mapped(result.axes, under, convert)


def under_switches(plan: Plan) -> Callable[[Layout], Layout]:
    """Return a function that adds the plan's switches to layouts without switches."""
    numbers = {axis.name: number for number, axis in enumerate(plan.axes)}
    switches: dict[int, list[Layout]] = defaultdict(list)
    for branch in plan.branches:
        for name in branch.axes:
            if branch.name in numbers and name in numbers:
                switches[numbers[name]].append(switch(numbers[branch.name]))

    def leaf(slots: Slots) -> Layout:
        return Prod((*switches[slots.axis], slots)) if slots.axis in switches else slots

    return (lambda layout: substitute(layout, leaf)) if switches else (lambda layout: layout)


def without_switches(plan: Plan, layout: Layout) -> Layout:
    """Return the layout without the factors that are switches."""
    return without_factors(layout, {n for n, axis in enumerate(plan.axes) if axis.kind == KIND})


def switch(number: int) -> Layout:
    """Return the layout of the switch with this axis number."""
    return Slots(number, 0, 1)


def _site(plan: Plan, sites: dict[tuple[str, int], Site], tensor: str) -> Site:
    """Return the site at which a switch multiplies a parameter: a dim without single inputs."""
    dims = plan.tensors[tensor]
    taken = (sites.get((tensor, dim)) for dim in range(len(dims)))
    dim = next(i for i, s in enumerate(taken) if s is None or not isinstance(s.layout, Gated))
    return sites.get((tensor, dim)) or Site(tensor, dim, Const(dims[dim].size), "write")


def gone(plan: Plan, kept: Tensor) -> list[str]:
    """Return the names of the branches whose switches are not kept."""
    return [plan.axes[number].name for number in _closed(plan, kept)]


def dead_parameters(plan: Plan, gone: Collection[str]) -> list[str]:
    """Return the parameters that nothing needs without these branches, by name."""
    needed: dict[str, bool] = {}
    for cost in plan.costs:
        if cost.unit == "params":
            needed[cost.tensor] = needed.get(cost.tensor, False) or is_needed(cost.needed, gone)
    return [name for name, is_there in needed.items() if not is_there]


def _closed(plan: Plan, open_: Tensor) -> list[int]:
    """Return the numbers of the axes that are closed switches."""
    numbered = enumerate(plan.axes)
    return [n for n, axis in numbered if axis.kind == KIND and not bool(open_[axis.start])]


def with_all_branches(plan: Plan, kept: Tensor) -> Tensor:
    """Return the kept slots if all branches stay; closed switches then multiply by zero.

    Axes that only closed branches need are as narrow as possible.
    """
    return plan.kept(kept & ~idle(plan, kept)) | switches_of(plan)


def idle(plan: Plan, open_: Tensor) -> Tensor:
    """Return the slots of axes that only branches with closed switches need.

    Shape: open_ bool, flat; result bool, ``(plan.size,)``.
    """
    result = torch.zeros(plan.size, dtype=torch.bool)
    out = set(_closed(plan, open_))
    if out:
        there = (_there(Prod(cost.dims), out) for cost in plan.costs)
        needed = set().union(*(axes for axes in there if axes is not None))
        for number in set(range(len(plan.axes))) - needed - out:
            result[plan.axes[number].slice] = True
    return result


def without_idle(plan: Plan, open_: Tensor) -> Tensor:
    """Return the open gates without those of removed branches and of axes that only these need.

    Shape: ``open_`` bool, flat; result bool, ``(plan.size,)``.
    """
    kept, result = plan.kept(open_), open_.clone()
    for number in _closed(plan, kept):
        result[plan.axes[number].slice] = False
    return result & ~idle(plan, kept)


def _there(layout: Layout, out: Collection[int]) -> frozenset[int] | None:
    """Return the axes of the positions that remain without ``out``; None if none remain."""
    match layout:
        case Slots(axis):
            return None if axis in out else frozenset([axis])
        case Cat(parts):
            some = [axes for part in parts if (axes := _there(part, out)) is not None]
            return frozenset().union(*some) if some else None
        case _:
            every = [_there(child, out) for child in children(layout)]
            return None if None in every else frozenset().union(*filter(None, every))


def switches_of(plan: Plan) -> Tensor:
    """Return a mask of the gates that are switches; bool, shape ``(plan.size,)``."""
    result = torch.zeros(plan.size, dtype=torch.bool)
    for axis in plan.axes:
        result[axis.slice] = axis.kind == KIND
    return result
