"""Parameters, multiply-accumulates and slots, counted exactly."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from l0prune.cost.measures.base import Axes
from l0prune.cost.measures.registry import register
from l0prune.cost.measures.terms import SumOfTerms
from l0prune.cost.model import CostModel
from l0prune.plan.branch import KIND
from l0prune.plan.layout import Slots
from l0prune.plan.plan import Cost, Plan

_LARGE = ["", " k", " M", " G", " T"]


class Count(SumOfTerms):
    """A whole number of things that a network has."""

    suffixes: ClassVar = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

    def actual(self, open_: Tensor, through: Axes = None) -> int:
        """The count of the model that an export with these open gates makes."""
        return self.costs.actual(open_, self.name, through)

    def dense(self, through: Axes = None) -> int:
        """The count with all gates open."""
        return self.costs.dense(self.name, through)

    @classmethod
    def show(cls, amount: float) -> str:
        """All digits: ``77,312``."""
        return f"{round(amount):,}"

    @classmethod
    def brief(cls, amount: float) -> str:
        """Three digits: ``77.3 k``."""
        value, units = float(amount), list(_LARGE)
        while value >= 999.5 and len(units) > 1:
            value /= 1000
            units.pop(0)
        return f"{value:.3g}{units[0]}"


@register
class Params(Count):
    """Parameters that an export has."""

    name, label = "params", "params"


@register
class Macs(Count):
    """Multiply-accumulates of one example; 1 MAC is 2 FLOPs."""

    name, label = "macs", "MACs"


@register
class Width(Count):
    """Slots of an axis: channels, neurons, heads; a branch has no width."""

    name, label = "width", "slots"
    suffixes: ClassVar = {"": 1.0}
    each_axis = True

    def __init__(self, plan: Plan) -> None:
        slots = (
            Cost(axis.name, self.name, 1.0, (Slots(number, 0, axis.size),))
            for number, axis in enumerate(plan.axes)
            if axis.kind != KIND
        )
        super().__init__(plan, CostModel(plan, [*slots]))
