"""Measures that are a sum of cost terms, each a product of open sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from l0prune.cost.measures.base import Axes, Measure
from l0prune.cost.model import CostModel, cost_of
from l0prune.plan.plan import Plan


class SumOfTerms(Measure):
    """``Σ scale × Π open size of dims``: exact under independent gates, in one evaluation.

    A subclass may take the terms for what gates learn by only, and say itself what is ``actual``.

    Attributes:
        costs: the terms.

    Args:
        plan: of the network.
        costs: terms whose unit is the measure's name; None for those of the plan.
    """

    def __init__(self, plan: Plan, costs: CostModel | None = None) -> None:
        super().__init__(plan)
        self.costs = cost_of(plan) if costs is None else costs

    def expected(self, p: Tensor, dtype: torch.dtype | None = None, through: Axes = None) -> Tensor:
        """The expected amount at open probabilities ``p``; see ``Measure``."""
        return self.costs.expected(p, self.name, dtype=dtype, through=through)

    def actual(self, open_: Tensor, through: Axes = None) -> float:
        """The amount of the model that an export with these open gates makes."""
        kept = self.plan.kept(open_).to(torch.float64)
        return self.costs.amount(kept, self.name, through)

    def dense(self, through: Axes = None) -> float:
        """The amount with all gates open."""
        return self.costs.dense_amount(self.name, through)

    def reachable(self) -> float:
        """The share of the dense amount that is gone once every gate is closed, from 0 to 1."""
        return self.costs.reachable(self.name)

    @property
    def axes(self) -> frozenset[int]:
        """Numbers of the axes whose slots count."""
        return self.costs.axes_in(self.name)

    def by_owner(self, kept: Tensor) -> dict[str, float]:
        """Return each module's amount, by path."""
        return self.costs.by_owner(kept, self.name)
