"""Pass of an export that selects the slots that stay."""

from __future__ import annotations

from dataclasses import replace

from l0prune.exporting.network import Network
from l0prune.exporting.slicing.kept_slots import KeptSlots, values_on
from l0prune.plan.plan import Plan


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
