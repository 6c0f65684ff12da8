"""Trial cuts of axes before training: some slots of each are cut from the graph as by an export.

All axes are tried at once, on shapes alone. Only where that fails, ever smaller groups of them show
which are at fault; these become pins, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from l0prune.gating.branch_trials import Failure, Trials, without_refused_branches
from l0prune.infer.build import Analysis
from l0prune.infer.parts import Parts
from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Pin, Plan

_OPEN = 0.6  # probability that a slot stays in a trial


def offered(parts: Parts) -> Parts:
    """Return the parts, with a plan of only those axes and branches that can be cut.

    With ``L0PRUNE_STRICT=1`` in the environment the error of a failed trial is raised.
    """
    parts = without_refused_branches(parts)
    failed = {name: why for part in parts.found for name, why in _failed(part.analysis)}
    return without(parts, failed)


def without(parts: Parts, failed: dict[str, Failure]) -> Parts:
    """Return the parts, with a plan in which these axes are pins, and no branch needs them."""
    plan = parts.plan
    if failed.keys().isdisjoint(plan.names):
        return parts
    left = {name for name in plan.names if name not in failed}
    branches = (
        replace(branch, closing=tuple(name for name in branch.closing if name in left))
        for branch in plan.branches
        if left.issuperset(branch.axes)
    )
    pins = tuple(_pins(plan, failed))
    plan = replace(plan.select(left), branches=tuple(branches))
    return replace(parts, plan=replace(plan, pins=(*plan.pins, *pins)))


def _pins(plan: Plan, failed: dict[str, Failure]) -> Iterator[Pin]:
    """Yield a pin for each dim of a parameter with slots of a failed axis."""
    for tensor, dims in plan.tensors.items():
        for number, dim in enumerate(dims if tensor in plan.roles else ()):
            names = (plan.axes[axis].name for axis in sorted(axes_of(dim)))
            if name := next((name for name in names if name in failed), ""):
                yield failed[name].pin(f"{tensor} dim {number}", f"cutting slots of {name} failed")


def _failed(analysis: Analysis) -> Iterator[tuple[str, Failure]]:
    """Yield the axes of a graph that cannot be cut, each with the failure."""
    trials, plan = Trials(analysis, ()), analysis.plan
    is_open = torch.rand(plan.size, generator=torch.Generator().manual_seed(0)) < _OPEN

    def attempt(names: Collection[str]) -> Failure | None:
        closed = torch.zeros(plan.size, dtype=torch.bool)
        for axis in plan.axes:
            if axis.name in names:
                closed[axis.slice] = ~is_open[axis.slice]
                closed[axis.start + axis.size - 1] = axis.size > 1
        return trials.failure(~closed)

    yield from at_fault([axis.name for axis in plan.axes], attempt)


Why = TypeVar("Why")


def at_fault(
    names: Sequence[str], attempt: Callable[[Collection[str]], Why | None]
) -> Iterator[tuple[str, Why]]:
    """Yield names without which an attempt with all others succeeds, each with a failure.

    Each is found by ever smaller groups; groups that fail only together lose their last names.
    """
    why = attempt(names) if names else None
    if why is None:
        return
    if len(names) == 1:
        yield names[0], why
        return
    half = len(names) // 2
    found = [each for part in (names[:half], names[half:]) for each in at_fault(part, attempt)]
    yield from found
    guilty = {name for name, _ in found}
    left = [name for name in names if name not in guilty]
    while left and (why := attempt(left)) is not None:
        yield left.pop(), why
