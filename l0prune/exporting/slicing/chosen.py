"""Which slots stay, and the gates' values on them, in the axes of the model's own capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from l0prune.plan.branch import Branch
from l0prune.plan.layout import Both
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone


@dataclass(frozen=True)
class Chosen:
    """The gates of one plan as they count for the cut.

    Attributes:
        plan: whose axes.
        z: the value of each gate; 1 where the model has none.
        kept: the slots that stay, bool; both flat, shape ``(plan.size,)``.
    """

    plan: Plan
    z: Tensor
    kept: Tensor

    @property
    def picks_inputs(self) -> tuple[str, ...]:
        """Axes of single inputs that are closed: what reads them needs a gather."""
        plan = self.plan
        columns = [d for dims in plan.tensors.values() for d in dims if isinstance(d, Both)]
        gathers = any(
            not plan.mask(d, self.kept)[plan.mask(d.base, self.kept)].all() for d in columns
        )
        inputs = [axis for axis in plan.axes if axis.kind == "input"] if gathers else []
        return tuple(axis.name for axis in inputs if not self.is_open[axis.slice].all())

    @property
    def gone(self) -> tuple[Branch, ...]:
        """The branches that are left out."""
        names = gone(self.plan, self.kept)
        return tuple(branch for branch in self.plan.branches if branch.name in names)

    def on(self, plan: Plan) -> Chosen:
        """The same on the axes of another plan of the model; all stays that has no gate here."""
        z, kept = (values_on(plan, self.plan, values) for values in (self.z, self.kept))
        return Chosen(plan, z, kept)

    @property
    def is_open(self) -> Tensor:
        """Which gates are open, bool, flat."""
        return self.z > 0


def values_on(plan: Plan, gated: Plan, values: Tensor) -> Tensor:
    """Values of the gates for every axis of ``plan``: 1 where ``gated`` has none."""
    full = torch.ones(plan.size, dtype=values.dtype)
    slices = {axis.name: axis.slice for axis in gated.axes}
    for axis in plan.axes:
        if axis.name in slices:
            full[axis.slice] = values[slices[axis.name]].cpu()
    return full
