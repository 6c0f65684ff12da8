"""Pass of an export that captures the gated model again: its graphs, with the plan of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from l0prune.capture.capture import Captured, capture
from l0prune.errors import UsageError
from l0prune.exporting.certify.inputs import with_free_batch
from l0prune.exporting.network import Network
from l0prune.infer.build import analyse
from l0prune.infer.own_code import with_code
from l0prune.infer.parts import Part, Parts, parts_of
from l0prune.infer.rewrites.resized import with_switches
from l0prune.plan.branch import KIND
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switched
from l0prune.progress.stages import stage


def capture_parts(network: Network) -> Network:
    """Capture the model, whole or in parts, and infer the plans."""
    return replace(network, parts=surveyed(network))


_OTHER_AXES = (
    "in the graph with a free batch size l0prune finds other axes than those that were gated; "
    "please report this with the model's code"
)


@stage("capturing the model")
def surveyed(network: Network, *, frees_batch: bool = True) -> Parts:
    """Capture the model's parts and infer plans, with a free batch if its plan fits the gates.

    With ``frees_batch`` a free batch is tried for a whole model; it takes at least twice as long.

    Raises:
        CaptureError: torch.export can no longer follow the model.
        UsageError: the model has changed since it was gated.
    """
    plain, example, gated_by = network.plain, network.example, network.plan
    if not gated_by.in_parts:
        why_fixed = ""
        for captured in _captures(network, frees_batch):
            captured = replace(captured, why_fixed=captured.why_fixed or why_fixed)
            analysis = with_code(analyse(captured), plain)
            analysis = with_switches(analysis, _as_gated(analysis.plan, gated_by))
            if _same_gates(analysis.plan, gated_by):
                unused = analysis.captured.unused
                return Parts(analysis.plan, example, [Part("", analysis, example)], unused)
            why_fixed = _OTHER_AXES
    else:
        parts = parts_of(plain, example)
        parts.plan = _as_gated(parts.plan, gated_by)
        for number, part in enumerate(parts.found):
            analysis = with_switches(part.analysis, _as_gated(part.analysis.plan, gated_by))
            parts.found[number] = replace(part, analysis=analysis)
        if _same_gates(parts.plan, gated_by):
            return parts
    raise UsageError(
        "The gates do not fit what a copy of the model computes. Either its forward has changed "
        "since it was gated: ungate it (l0prune.ungate) and gate it again. Or its code reaches the "
        "model by a global or another object, where a copy still finds the original: let it use "
        "self, or what self holds."
    )


def _captures(network: Network, frees_batch: bool) -> Iterator[Captured]:
    """Yield captures of the whole model to try in turn."""
    if frees_batch:
        yield with_free_batch(network.plain, network.example, network.free)
    yield capture(network.plain, *network.example)


def _as_gated(plan: Plan, gated_by: Plan) -> Plan:
    """Give a plan the switches and groups of the gates' plan, and no ``alike`` if that has none."""
    plan = switched(plan, [axis.name for axis in gated_by.axes if axis.kind == KIND])
    groups = {name: getattr(gated_by, name) for name in ("together", "allowed", "divisors")}
    plan = replace(plan, **groups)
    return plan if gated_by.alike else replace(plan, alike=())


def _same_gates(plan: Plan, gated_by: Plan) -> bool:
    """Return whether both plans have the same parts, and gates at the same sites in any order."""
    sites = plan.select(gated_by.names).sites
    return plan.parts == gated_by.parts and set(sites) == set(gated_by.sites)
