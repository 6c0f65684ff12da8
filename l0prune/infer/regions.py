"""What of a graph is computed for some of its operators alone, and what work that is.

Where a branch of a graph ends: in a sum, or as a part of concatenations.

Of each node of a graph, which branches have to be there for it to be needed.

A node is needed if any of its users is, or any that reads later what it writes in place. What a
branch ends in needs it only while the branch is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from math import prod

from torch.fx import Graph, Node

from l0prune.capture.provenance import module_of
from l0prune.infer.activations import Memory
from l0prune.infer.expressions import Var
from l0prune.infer.inference import Inference
from l0prune.infer.nodes import CONCATENATIONS, argument, is_writer, operator_name
from l0prune.plan.branch import ALWAYS, Needs, shortest


def region(
    end: Node, joins: Collection[Node], read: Mapping[Node, Needs], memory: Memory
) -> frozenset[Node]:
    """The nodes whose results reach nothing but these joins; none where that is not so of the end.

    ``read`` is empty for nodes that reach no output, such as what only asserts.
    """

    def readers(node: Node) -> set[Node]:
        return {user for user in memory.readers(node) if read[user]}

    if end.op != "call_function" or readers(end) != set(joins):
        return frozenset()
    found, pending = {end}, list(memory.sources(end))
    while pending:
        node = pending.pop()
        if node in found or node.op != "call_function" or not readers(node) <= found:
            continue
        found.add(node)
        pending += memory.sources(node)
    writes = any(is_writer(node) and memory.base(node) not in found for node in found)
    return frozenset() if writes else frozenset(found)


def macs_of(infer: Inference) -> dict[Node, float]:
    """Multiply-accumulates of each node that does work, for one example."""
    found: dict[Node, float] = defaultdict(float)
    for work in infer.works:
        sizes = [dim.size for dim in work.dims]
        sizes += [infer.tensors[name][number].size for name, number in work.places]
        found[work.node] += work.scale * prod(sizes)
    return found


def shared_module(nodes: Iterable[Node]) -> str:
    """What the names of the modules begin with in which these nodes are, by whole words."""
    paths = [module_of(node).split(".") for node in nodes]
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False))
    return ".".join(words[0] for words in shared)


def untaken(name: str, taken: set[str]) -> str:
    """The name, or one like it that is not taken; it is taken then."""
    name = f"{name}.branch" if name in taken else name
    found = next(n for i in count(1) if (n := name if i == 1 else f"{name}#{i}") not in taken)
    taken.add(found)
    return found


SUMS = ("aten.add", "aten.add_")


@dataclass(frozen=True)
class Ending:
    """Where a branch ends.

    Attributes:
        name: of the branch.
        end: what the branch computes.
        joins: the one sum, or the concatenations, that take it.
        tensors: parameters for which the branch is zero where they are; empty for concatenations.
        axes: without whose slots the branch has no size; empty for a sum.
    """

    name: str
    end: Node
    joins: tuple[Node, ...]
    tensors: tuple[str, ...] = ()
    axes: tuple[Var, ...] = ()


def is_concatenation(node: Node) -> bool:
    """Does the node put tensors side by side?"""
    return node.op == "call_function" and operator_name(node.target) in CONCATENATIONS


def joined(join: Node) -> list[Node]:
    """What a sum adds, or a concatenation puts side by side."""
    parts = argument(join, 0, "tensors") if is_concatenation(join) else join.args[:2]
    return [part for part in parts if isinstance(part, Node)]


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
