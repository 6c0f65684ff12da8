"""Passes of an export that fold the gates into the tensors, and slice tensors and graphs."""

from __future__ import annotations

from dataclasses import replace

from l0prune.exporting.network import Network, NotThisWay
from l0prune.exporting.slicing.graph import dense_graphs, narrowing
from l0prune.exporting.slicing.tensors import cut_by_plan, cut_tensors
from l0prune.running.device import device_of


def slice_by_plan(network: Network) -> Network:
    """Fold and slice the tensors by the plan of the gates, without a capture.

    Raises:
        NotThisWay: the model has other tensors than that plan.
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
    """Put the sliced tensors into the captured graphs, and rewrite the sizes in these."""
    parts, narrow = network.captured, network.narrow
    if parts.plan.parts == ("",):
        narrow = narrowing(parts.found[0].analysis, network.by_part[""].kept)
    device = device_of(network.plain)
    graphs = dense_graphs(parts, network.by_part, network.tensors, network.dtypes, device)
    return replace(network, graphs=graphs, narrow=narrow)
