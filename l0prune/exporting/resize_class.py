"""Passes of an export that make candidates of the model's own class at the new sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from l0prune.exporting.certify.verify import counted_in
from l0prune.exporting.network import Network, NotThisWay
from l0prune.exporting.own_class.choice import own_class
from l0prune.exporting.own_class.skipped_modules import around, ways_around


def check_class_alone(network: Network) -> Network:
    """Check that the own class can be verified without captured graphs.

    Raises:
        NotThisWay: the model was captured in parts, or loses branches, and only a capture shows
            which modules to skip for these.
    """
    is_whole = not network.plan.in_parts and "" not in counted_in(network.plan)
    if not is_whole or (network.gone and network.parts is None):
        raise NotThisWay
    return network


def resize_class(network: Network) -> Network:
    """Make a candidate of the own class from the cut tensors and all that follows their sizes."""
    return replace(network, classes=(own_class(network.plain, network.selected, network.tensors),))


def drop_branches(network: Network) -> Network:
    """Put the candidates first that skip the removed branches.

    Without graphs, which show when a class still computes such a branch, only these stay.
    """
    if not network.gone:
        return network
    (own,), found = network.classes, network.captured.found
    plan, has_graphs = network.selected.plan, bool(network.graphs)
    ways = ways_around(network.plain, found, network.by_part, network.gone)
    classes = (around(own, way, plan, found, drops=has_graphs) for way in ways)
    return replace(network, classes=chain(classes, [own]) if has_graphs else classes)
