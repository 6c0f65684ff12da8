"""Passes of an export that make candidates of the model's own class at the new sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from l0prune.exporting.certify.verify import counted_in
from l0prune.exporting.network import Network, NotThisWay
from l0prune.exporting.own_class.choice import own_class
from l0prune.exporting.own_class.skipped_modules import around, ways_around


def check_class_alone(network: Network) -> Network:
    """Check that the own class can be shown to be right without captured graphs.

    Raises:
        NotThisWay: it cannot: the model was captured in parts, or loses branches around which only
            a capture shows the way.
    """
    is_whole = network.plan.parts == ("",) and "" not in counted_in(network.plan)
    if not is_whole or (network.gone and network.parts is None):
        raise NotThisWay
    return network


def resize_class(network: Network) -> Network:
    """Give the own class its cut tensors, and what else follows the new sizes."""
    return replace(network, classes=(own_class(network.plain, network.selected, network.tensors),))


def drop_branches(network: Network) -> Network:
    """Put the classes first that skip the branches that are gone.

    Without graphs, which show when a class computes such a branch after all, only these stay.
    """
    if not network.gone:
        return network
    (own,), found = network.classes, network.captured.found
    plan, has_graphs = network.selected.plan, bool(network.graphs)
    ways = ways_around(network.plain, found, network.by_part, network.gone)
    classes = (around(own, way, plan, drops=has_graphs) for way in ways)
    return replace(network, classes=chain(classes, [own]) if has_graphs else classes)
