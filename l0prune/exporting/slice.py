"""Passes of an export that select slots, fold their gates, and slice tensors and graphs."""

from __future__ import annotations

from dataclasses import replace

from l0prune.exporting.network import Network, NotThisWay
from l0prune.exporting.slicing.graph import dense_graphs, narrowing
from l0prune.exporting.slicing.kept_slots import KeptSlots, values_on
from l0prune.exporting.slicing.tensors import cut_by_plan, cut_tensors
from l0prune.plan.plan import Plan
from l0prune.running.device import device_of


def select(network: Network) -> Network:
    """Select the slots that the gates leave, on the axes of the capture if there was one."""
    plan, found = network.plan, []
    if network.parts is not None:
        plan, found = network.parts.plan, network.parts.found
    by_part = {part.path: chosen_on(part.analysis.plan, network) for part in found}
    return replace(network, chosen=chosen_on(plan, network), by_part=by_part)


def chosen_on(plan: Plan, network: Network) -> KeptSlots:
    """Return the slots that the gates leave on the axes of this plan of the model."""
    z = values_on(plan, network.plan, network.z)
    return KeptSlots(plan, z, plan.kept(z > 0))


def slice_by_plan(network: Network) -> Network:
    """Fold and slice the tensors by the plan of the gates, without a capture.

    Raises:
        NotThisWay: the model's tensors have other shapes than in that plan.
    """
    tensors = cut_by_plan(network.plain, network.selected)
    if tensors is None:
        raise NotThisWay
    return replace(network, tensors=tensors)


def slice_tensors(network: Network) -> Network:
    """Fold and slice every tensor that the captured parts use."""
    tensors = cut_tensors(network.plain, network.captured, network.by_part)
    return replace(network, tensors=tensors)


def slice_graphs(network: Network) -> Network:
    """Put the sliced tensors into the captured graphs, and rewrite the sizes in the graphs."""
    parts, narrow = network.captured, network.narrow
    if not parts.plan.in_parts:
        narrow = narrowing(parts.found[0].analysis, network.by_part[""].kept)
    device = device_of(network.plain)
    graphs = dense_graphs(parts, network.by_part, network.tensors, network.dtypes, device)
    return replace(network, graphs=graphs, narrow=narrow)
