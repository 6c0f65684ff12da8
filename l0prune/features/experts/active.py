"""Parameters that one input uses, as a measure: of a mixture those of the experts it chooses."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from l0prune.capture.copying import copied_around
from l0prune.errors import UsageError
from l0prune.features.experts.mixtures import mixtures_in, tensors_of_experts
from l0prune.gating.attaching import detach, holder
from l0prune.plan.cost import CostModel
from l0prune.plan.measures import Count, Measure, register
from l0prune.plan.plan import Plan


@register
class ActiveParams(Count):
    """Parameters that one input uses: an expert's count as often as its mixture chooses one."""

    name, label = "active_params", "active params"

    @classmethod
    def of(cls, plan: Plan) -> Measure:
        """Raise UsageError: a plan alone does not say how many experts an input gets."""
        raise UsageError(f"{cls.name} is counted of a gated model, under a budget in {cls.name}")

    @classmethod
    def of_model(cls, model: nn.Module, plan: Plan, at: str) -> Measure:
        """Return the measure of a gated model; UsageError if it has no mixture of experts."""
        root, gates = holder(model)
        plain = copied_around(root)
        detach(plain)
        share: dict[str, float] = {}
        for mixture in mixtures_in(plain, gates.example):
            router = mixture.router
            own, _ = tensors_of_experts(plain, mixture)
            share.update(dict.fromkeys(own, router.chosen / router.experts))
        counted = (cost for cost in plan.costs if cost.unit == "params")
        scaled = ((each, each.scale * share.get(each.tensor, 1.0)) for each in counted)
        costs = [replace(each, unit=cls.name, scale=scale) for each, scale in scaled]
        return cls(plan, CostModel(plan, costs))
