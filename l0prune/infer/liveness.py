"""Of each node of a graph, which branches have to be there for it to be needed.

A node is needed if any of its users is, or any that reads later what it writes in place. What a
branch ends in needs it only while the branch is there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from l0prune.infer.memory import Memory
from l0prune.plan.needs import ALWAYS, Needs, shortest


def needs(graph: Graph, branch_of: Callable[[Node, Node], str | None]) -> dict[Node, Needs]:
    """Of each node of a graph.

    Args:
        graph: as it was captured.
        branch_of: of a node and a user of it, the name of the branch that ends there, if one does.
    """
    found: dict[Node, Needs] = {}
    memory = Memory(graph)
    for node in reversed(graph.nodes):
        if node.op == "output":
            found[node] = ALWAYS
            continue
        wanted = {
            each | _named(branch_of(node, user))
            for user in memory.readers(node)
            for each in found[user]
        }
        found[node] = shortest(wanted)
    return found


def _named(branch: str | None) -> frozenset[str]:
    return frozenset() if branch is None else frozenset([branch])
