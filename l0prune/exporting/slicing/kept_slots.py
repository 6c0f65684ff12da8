"""Slots that stay, and the gates' values on them, on the axes of one plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from l0prune.plan.branch import Branch
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone


@dataclass(frozen=True)
class KeptSlots:
    """Gate values and kept slots on the axes of one plan.

    Attributes:
        plan: the plan with the axes.
        z: the value of each gate; 1 for slots without a gate.
        kept: the slots that stay, bool; both flat, shape ``(plan.size,)``.
    """

    plan: Plan
    z: Tensor
    kept: Tensor

    @property
    def gone(self) -> tuple[Branch, ...]:
        """The removed branches."""
        names = gone(self.plan, self.kept)
        return tuple(branch for branch in self.plan.branches if branch.name in names)

    def on(self, plan: Plan) -> KeptSlots:
        """Return the kept slots on the axes of another plan; slots without a gate here stay."""
        z, kept = (values_on(plan, self.plan, values) for values in (self.z, self.kept))
        return KeptSlots(plan, z, kept)

    @property
    def is_open(self) -> Tensor:
        """Open gates, bool, flat."""
        return self.z > 0


def values_on(plan: Plan, gated: Plan, values: Tensor) -> Tensor:
    """Return ``values`` of gates for every axis of ``plan``; 1 for axes that ``gated`` lacks."""
    full = torch.ones(plan.size, dtype=values.dtype)
    slices = {axis.name: axis.slice for axis in gated.axes}
    for axis in plan.axes:
        if axis.name in slices:
            full[axis.slice] = values[slices[axis.name]].cpu()
    return full
