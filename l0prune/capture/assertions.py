"""Assertions of a captured graph about its values: nodes that nothing else reads."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Node


def erase_if_asserted(node: Node) -> bool:
    """Erase a node and the numbers computed from it, if only assertions read these.

    Returns:
        Whether it was erased.
    """
    made = dict.fromkeys([node])
    for each in node.graph.nodes:
        if any(operand in made for operand in each.all_input_nodes):
            made[each] = None
    if not all(each is node or _is_number(each) for each in made):
        return False
    for each in reversed(made):
        node.graph.erase_node(each)
    return True


def _is_number(node: Node) -> bool:
    """Return whether a node is a list's element, a number of a tensor, or an assertion."""
    if node.target is operator.getitem:
        return True
    return node.op == "call_function" and not isinstance(node.meta.get("val"), Tensor)
