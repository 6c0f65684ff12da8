"""Leaving whole branches out of a captured graph: a sum without one is its other operand."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import GraphModule, Node

from l0prune.infer.branches import Branches
from l0prune.infer.nodes import may_view, written


def leave_out(module: GraphModule, branches: Branches, gone: Collection[str]) -> None:
    """Take these branches out, and all that only they need.

    Args:
        module: the captured graph, whose operators have the names that they had in the capture.
        branches: of the capture.
        gone: names of those that are left out.
    """
    if not gone:
        return
    nodes = {node.name: node for node in module.graph.nodes}
    out = [ending for ending in branches.endings if ending.name in gone]
    for ending in out:
        join = nodes[ending.join.name]
        position = ending.join.args.index(ending.stays)
        stays = join.args[position]
        assert isinstance(stays, Node)
        if _is_written_into(join) and len(stays.users) > 1:
            with module.graph.inserting_before(join):
                stays = module.graph.call_function(torch.ops.aten.clone.default, (stays,))
        join.replace_all_uses_with(stays)
        module.graph.erase_node(join)
        nodes[ending.join.name] = stays
    dead = {node.name for node in branches.dead(gone)}
    for node in reversed(list(module.graph.nodes)):
        # torch keeps what writes in place, which these do into nothing that is left
        if node.name in dead and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _is_written_into(node: Node) -> bool:
    """Does an operator write into this value later, or into a view of it?"""
    return any(written(user) is value for value in _views(node) for user in value.users)


def _views(node: Node) -> Iterator[Node]:
    """The node, and all that may lie in its memory."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        yield value
        for user in value.users:
            if may_view(user) and user not in seen:
                seen.add(user)
                pending.append(user)
