"""Trial cuts of axes before training: some slots of each are cut from the graph as by an export.

All axes are tried at once, on shapes alone. Only where that fails, ever smaller groups of them show
which are at fault; these become pins, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from l0prune.gating.at_fault import at_fault
from l0prune.gating.branch_trials import REFUSED, Failure, Trials, without_refused_branches
from l0prune.gating.number_trials import faults
from l0prune.infer.build import Analysis
from l0prune.infer.parts import Parts, inferred
from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Pin, Plan
from l0prune.progress.stages import counting, stage

_OPEN = 0.6  # probability that a slot stays in a trial


_WEIGHTS = (5, 3, 1, 1)  # about how long the steps take: capture, branches, axes, numbers


@stage("looking for what can be cut")
def offered(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Parts:
    """Return the model's parts, with a plan of only what can be gated and cut.

    With ``L0PRUNE_STRICT=1`` in the environment the error of a failed trial is raised.

    Raises:
        CaptureError: torch.export cannot follow the model's forward on these inputs.
        UsageError: the model cannot be analysed, the example holds no tensor, or none that
            ``dynamic_shapes`` names.
    """
    passes: list[Callable[[Parts], Parts]] = [
        without_refused_branches,
        _without_failed,
        partial(_without_faults, model),
    ]
    with counting(sum(_WEIGHTS)) as counter:
        with counter.takes(_WEIGHTS[0]):
            parts = inferred(model, args, kwargs, dynamic_shapes)
        for each, weight in zip(passes, _WEIGHTS[1:], strict=True):
            with counter.takes(weight):
                parts = each(parts)
    return parts


def _without_failed(parts: Parts) -> Parts:
    failed = {
        name: why.pin("", f"cutting slots of {name} failed")
        for part in parts.found
        for name, why in _failed(part.analysis)
    }
    return _without(parts, failed)


def _without_faults(model: nn.Module, parts: Parts) -> Parts:
    found = faults(model, parts)
    return _without(parts, {name: Pin("", why.format(name)) for name, why in found.items()})


def _without(parts: Parts, failed: Mapping[str, Pin]) -> Parts:
    """Return the parts, with a plan without these axes and branches, and pins in their place."""
    plan = parts.plan
    left = {name for name in plan.names if name not in failed}
    branches = tuple(
        replace(branch, closing=tuple(name for name in branch.closing if name in left))
        for branch in plan.branches
        if branch.name not in failed and left.issuperset(branch.axes)
    )
    pins = (*plan.pins, *_pins(plan, failed))
    return replace(parts, plan=replace(plan.select(left), branches=branches, pins=pins))


def _pins(plan: Plan, failed: Mapping[str, Pin]) -> Iterator[Pin]:
    """Yield a pin for each failed branch, and for each dim of a parameter with a failed axis."""
    for branch in plan.branches:
        if branch.name in failed:
            yield replace(failed[branch.name], where=f"{REFUSED}{branch.name}")
    for tensor, dims in plan.tensors.items():
        for number, dim in enumerate(dims if tensor in plan.roles else ()):
            names = (plan.axes[axis].name for axis in sorted(axes_of(dim)))
            if name := next((name for name in names if name in failed), ""):
                yield replace(failed[name], where=f"{tensor} dim {number}")


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
