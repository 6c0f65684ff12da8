"""Sizes of free dims at which the shapes of a captured graph hold.

torch.export takes two sizes that it finds equal for equal ever after. A model may run at sizes
where they are not, by broadcasting: an image of 1×1 whose features, scaled up, are 2×2. A file says
of its values what the graph does, and no runtime computes others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from l0prune.capture.compat import size_expression
from l0prune.infer.nodes import is_pointwise


def shapes_hold(graph: Graph, sizes: Iterable[tuple[Any, int]]) -> bool:
    """Check that operands of elementwise calls are as large as the graph says of the result.

    Dims of the graph's size 1 are broadcast at all sizes, and sizes that depend on data are passed
    over.

    Args:
        graph: of a program.
        sizes: pairs of a symbolic size of an input and its value.
    """
    values = {size_expression(a): b for a, b in sizes if not isinstance(a, int)}
    return all(
        _fits(operand, node, values)
        for node in graph.nodes
        if node.op == "call_function" and is_pointwise(node.target)
        if isinstance(node.meta.get("val"), Tensor)
        for operand in node.all_input_nodes
        if isinstance(operand.meta.get("val"), Tensor)
    )


def _fits(operand: Node, node: Node, values: Mapping[Any, int]) -> bool:
    shapes = ([*map(size_expression, reversed(n.meta["val"].shape))] for n in (operand, node))
    for have, want in zip(*shapes, strict=False):
        first, second = _at(have, values), _at(want, values)
        is_known = isinstance(first, int) and isinstance(second, int)
        if is_known and first != second and not isinstance(have, int):
            return False
    return True


def _at(size: Any, values: Mapping[Any, int]) -> Any:
    """Return a size's value; its expression where that depends on more, as on the batch."""
    if isinstance(size, int):
        return size
    found = size.subs(values)
    return int(found) if found.is_Integer else found
