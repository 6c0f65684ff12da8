"""What of a graph is computed for some of its operators alone, and what work that is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import count, takewhile
from math import prod

from torch.fx import Node

from l0prune.capture.provenance import module_of
from l0prune.infer.inference import Inference
from l0prune.infer.memory import Memory
from l0prune.infer.nodes import is_writer
from l0prune.plan.needs import Needs


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
