"""Leaving whole branches out of a captured graph.

A sum without one is its other operand, and a concatenation has a part less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from l0prune.infer.branches import Branches
from l0prune.infer.ending import joined
from l0prune.infer.memory import Memory


def leave_out(graph: Graph, branches: Branches, gone: Collection[str]) -> list[Node]:
    """Take these branches out, and all that only they need.

    Args:
        graph: that was captured, whose operators have the names that they had in the capture.
        branches: of the capture.
        gone: names of those that are left out.

    Returns:
        Joins with one operand left, as aliases of it, for ``pass_on``: what averages over them
        still has to know how wide they were, and where they are zero.
    """
    if not gone:
        return []
    ends: dict[Node, list[Node]] = defaultdict(list)
    for ending in branches.endings:
        for join in ending.joins if ending.name in gone else ():
            ends[join].append(ending.end)
    nodes = {node.name: node for node in graph.nodes}
    single = []
    for join, out in ends.items():
        # by place: what stands there now is another node if it was a join, too
        node, parts = nodes[join.name], joined(nodes[join.name])
        left = [parts[place] for place, each in enumerate(joined(join)) if each not in out]
        if len(left) > 1:
            node.args = (left, *node.args[1:])
        else:
            node.target, node.args, node.kwargs = torch.ops.aten.alias.default, tuple(left), {}
            single.append(node)
    dead = {node.name for node in branches.dead(gone)}
    needless = {node.name for node, of in branches.needs.items() if not of}
    for node in graph.nodes:  # what asserts, or writes where nobody reads
        if node.name in needless and any(of.name in dead for of in node.all_input_nodes):
            dead.add(node.name)
    for node in reversed(list(graph.nodes)):
        # torch keeps what writes in place or may draw, which these do for nothing that is left
        if node.name in dead and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return [node for node in single if node in graph.nodes]


def pass_on(join: Node) -> None:
    """Let what reads a join read the one operand that it has left, or a copy where one is written.

    What is written into the join later must not change the operand, nor the other way round.
    """
    (left,) = join.all_input_nodes
    memory = Memory(join.graph)  # the join is an alias: both lie in one
    is_written = any(writer > join for writer in memory.writers(left))
    if is_written and (len(left.users) > 1 or memory.base(left) is not left):
        with join.graph.inserting_before(join):
            left = join.graph.call_function(torch.ops.aten.clone.default, (left,))
    join.replace_all_uses_with(left)
    join.graph.erase_node(join)
