"""The model's own class at fewer slots, without a capture: what it computes is the proof."""

from __future__ import annotations

from collections.abc import Set

from l0prune.cost.model import cost_of
from l0prune.exporting.certify.proof import Proven, prove_class
from l0prune.exporting.own_class.choice import own_class
from l0prune.exporting.own_class.passed_by import around, ways_around
from l0prune.exporting.slicing.chosen import Chosen
from l0prune.exporting.slicing.tensors import cut_by_plan
from l0prune.exporting.subject import Subject
from l0prune.infer.parts import Parts
from l0prune.plan.plan import Plan


def cut_class(subject: Subject, chosen: Chosen, parts: Parts | None = None) -> Proven | None:
    """The dense model of its own class; None where that is not shown to be the same function.

    Args:
        subject: before the cut.
        chosen: the slots that stay, all whose gates are open among them.
        parts: the model as it is captured, by which ways around branches that are gone are found.
    """
    plan, counted = subject.plan, counted_in(subject.plan)
    gone = [branch.name for branch in chosen.gone]
    if plan.parts != ("",) or "" in counted:
        return None
    if not subject.dtypes.are_one and not subject.exact_alone:
        return None
    if gone and parts is None:
        return None
    tensors = cut_by_plan(subject.plain, chosen)
    if tensors is None:
        return None
    own = own_class(subject.plain, chosen, tensors)
    predicted = round(cost_of(plan).amount(chosen.kept.double(), "params"))
    found = [] if parts is None else parts.found
    by_part = {part.path: chosen.on(part.analysis.plan) for part in found}
    ways = ways_around(subject.plain, found, by_part, gone)
    classes = (around(own, way, plan, drops=False) for way in ways)
    for each in classes if gone else [own]:
        proven = prove_class(subject, each, predicted, counted)
        if proven is not None:
            return proven
    return None


def counted_in(plan: Plan) -> Set[str]:
    """The parameters that count, by name: the others were not used in eval mode."""
    return {cost.tensor for cost in plan.costs if cost.unit == "params"}
