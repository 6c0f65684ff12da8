"""Requested widths: the axes they select, and why an axis cannot have some width."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.plan.branch import KIND
from l0prune.plan.globs import Globs, listed, matching, named
from l0prune.plan.layout import Layout, Prod, axes_of, children, constant_positions, show
from l0prune.plan.plan import Plan


def tensors_of_layers(plan: Plan, glob: str) -> list[str]:
    """Return the tensors of the layers that a path, or a glob over paths, selects.

    These are the tensors of matching modules and of all modules within, tied ones included; none
    where no module matches.
    """
    owners = {name: set(_above(name)) for name in (*plan.tensors, *plan.aliases)}
    paths = set().union(*owners.values())
    meant = {glob} if glob in paths else {path for path in paths if fnmatchcase(path, glob)}
    found = (plan.aliases.get(name, name) for name, of in owners.items() if of & meant)
    return list(dict.fromkeys(found))


def _above(name: str) -> Iterator[str]:
    """Yield a tensor's name, and the paths of the modules that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def axes_written(plan: Plan, tensors: Collection[str]) -> frozenset[int]:
    """Return the numbers of the axes on the output side of the layers with these tensors."""
    written = (
        dim
        for name in tensors
        for dim, role in zip(plan.tensors[name], plan.roles.get(name, ()), strict=False)
        if role == "write"
    )
    return frozenset().union(*map(axes_of, written))


def axes_met(plan: Plan, tensors: Collection[str]) -> frozenset[int]:
    """Return the numbers of the axes on any side of the layers with these tensors."""
    return frozenset().union(*(axes_of(dim) for name in tensors for dim in plan.tensors[name]))


def with_slots(plan: Plan, open_: Tensor, name: str, slots: Sequence[int]) -> Tensor:
    """Return the open gates with these slots of one axis open, and all others of it closed.

    Args:
        plan: of the network.
        open_: the gates that are open now; bool, shape ``(plan.size,)``.
        name: of the axis, or the path of the layer that writes it.
        slots: their numbers within the axis, from 0 on.

    Raises:
        UsageError: ``name`` selects no gated axis, or several, or the axis has no such slots.
    """
    numbers = [number for number, each in enumerate(plan.names) if each == name]
    numbers = numbers or sorted(axes_written(plan, tensors_of_layers(plan, name)))
    numbers = numbers or matching(plan.names, name, "set_open")
    if len(numbers) > 1:
        of = listed([plan.names[number] for number in numbers])
        raise UsageError(f"{name} has several axes: {of}. Give the name of one")
    (axis,) = (plan.axes[number] for number in numbers)
    wanted = [int(slot) for slot in slots]
    strange = [slot for slot in wanted if not 0 <= slot < axis.size]
    if strange or not (wanted or axis.kind == KIND):
        raise UsageError(
            f"{axis.name} has the slots 0 to {axis.size - 1}, of which one at least stays open, "
            f"not {strange or 'none'}"
        )
    result = open_.clone()
    result[axis.slice] = False
    result[torch.tensor(wanted, dtype=torch.int64) + axis.start] = True
    return result


def axes_to_keep(plan: Plan, layers: Globs) -> set[str]:
    """Return the names of the axes and branches that can remove parts of these layers.

    ``layers`` are paths or globs over them; what is no layer's path is the name of an axis.

    Raises:
        UsageError: a glob matches no layer and no axis.
    """
    found: set[str] = set()
    for glob in (layers,) if isinstance(layers, str) else layers:
        tensors = tensors_of_layers(plan, glob)
        if not tensors:
            what = "layer and no axis of this model"
            found.update(named(plan.names, glob, "keep", what))
        found.update(plan.names[number] for number in axes_met(plan, tensors))
        owners = {name.rpartition(".")[0] for name in tensors}
        found.update(each.name for each in plan.branches if not owners.isdisjoint(each.modules))
    return found


def uniform(plan: Plan) -> Plan:
    """Return the plan with one share for the width of every layer.

    Where a dim is a product of two axes (heads and head dims, groups and their channels) the
    outer one takes the share and the inner ones stay whole; so do single inputs of a layer.
    """
    inner = {axis for dims in plan.tensors.values() for dim in dims for axis in _inner(plan, dim)}
    cut = [
        axis.name
        for number, axis in enumerate(plan.axes)
        if axis.kind == KIND or (number not in inner and axis.kind != "input")
    ]
    plan = plan.select(cut)
    of_widths = tuple(axis.name for axis in plan.axes if axis.kind != KIND)
    branches = set(plan.names).difference(of_widths)
    others = [group for group in plan.together if branches.issuperset(group)]
    return replace(plan, together=(of_widths, *others))


def _inner(plan: Plan, layout: Layout) -> Iterator[int]:
    """Yield the axes of the inner factors of products, such as head dims within heads."""
    if isinstance(layout, Prod):
        axes = [{a for a in axes_of(f) if plan.axes[a].kind != KIND} for f in layout.factors]
        yield from set().union(*[of for of in axes if of][1:])
    for child in children(layout):
        yield from _inner(plan, child)


def out_of_reach(plan: Plan, asked: Mapping[int, int]) -> dict[int, tuple[int, str]]:
    """Return the attainable width, and the reason, for each requested one that is not possible.

    ``asked`` are numbers of slots, from 1 on, by the number of the axis.
    """
    open_ = torch.ones(plan.size, dtype=torch.bool)
    for number, count in asked.items():
        axis = plan.axes[number]
        open_[axis.start + count : axis.start + axis.size] = False
    kept = plan.kept(open_)
    left = {number: int(kept[plan.axes[number].slice].sum()) for number in asked}
    return {
        number: (left[number], _reason(plan, number, count))
        for number, count in asked.items()
        if left[number] != count
    }


def _reason(plan: Plan, number: int, count: int) -> str:
    """Explain why an axis cannot have ``count`` slots."""
    if count > plan.axes[number].size:
        return "it has no more"
    if number in plan.limited:
        return "it may have no other width near that one"
    for numbers in plan.equally_wide:
        if number in numbers:
            other = plan.axes[next(each for each in numbers if each != number)].name
            return f"it keeps as many as {other}: ask for one width of all that are alike"
    for dims in plan.alike:
        mine = [dim for dim in dims if number in axes_of(dim)]
        others = [dim for dim in dims if number not in axes_of(dim)]
        if mine and others:
            whole = max(others, key=constant_positions)
            one, other = show(mine[0], plan.names), show(whole, plan.names)
            return (
                f"the code has one size for {one} and for {other}{_pinned(plan, whole)}; "
                "keep_class=False lets them differ"
            )
    return "what reads it takes no fewer, or none of what it reads is left"


def _pinned(plan: Plan, whole: Layout) -> str:
    """Explain why a dim stays whole, in parentheses; empty where it does not."""
    if not constant_positions(whole):
        return ""
    of_one = {whole, *(whole.factors if isinstance(whole, Prod) else ())}
    places = {
        f"{name} dim {number}"
        for name, dims in plan.tensors.items()
        for number, dim in enumerate(dims)
        if dim in of_one
    }
    return next((f" ({p.where} is pinned, {p.reason})" for p in plan.pins if p.where in places), "")
