"""LayerNorm after some of its slots are gone, all of them zero before.

With ``n`` slots before and ``k`` after, ``mean = Σx / n`` and
``var = (Σ(x − mean)² + (n − k)·mean²) / n``: what each slot that went had to say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from l0prune.axes.nodes import argument
from l0prune.export.literals import rewrites
from l0prune.export.sizes import Sizes
from l0prune.layout import size_of

_ATEN = torch.ops.aten
_EPS = 1e-5


@rewrites("aten.layer_norm")
def layer_norm(sizes: Sizes, node: Node) -> None:
    """The same statistics from the slots that stayed."""
    dims = sizes.dims(node)
    layout = dims[-1]
    if not sizes.changes(layout):
        return
    graph, old, new = node.graph, size_of(layout), sizes.of(layout)
    x, weight, bias = node.args[0], argument(node, 2, "weight"), argument(node, 3, "bias")
    eps = argument(node, 4, "eps", _EPS)

    def call(operator: Any, *args: Any) -> Node:
        return graph.call_function(operator, args)

    with graph.inserting_before(node):
        mean = call(_ATEN.mul.Tensor, call(_ATEN.sum.dim_IntList, x, [-1], True), 1 / old)
        centred = call(_ATEN.sub.Tensor, x, mean)
        squares = call(_ATEN.sum.dim_IntList, call(_ATEN.square.default, centred), [-1], True)
        gone = call(_ATEN.mul.Tensor, call(_ATEN.square.default, mean), float(old - new))
        variance = call(_ATEN.mul.Tensor, call(_ATEN.add.Tensor, squares, gone), 1 / old)
        scale = call(_ATEN.rsqrt.default, call(_ATEN.add.Tensor, variance, eps))
        result = call(_ATEN.mul.Tensor, centred, scale)
        if isinstance(weight, Node):
            result = call(_ATEN.mul.Tensor, result, weight)
        if isinstance(bias, Node):
            result = call(_ATEN.add.Tensor, result, bias)
    sizes.layouts[result.name] = dims
    node.replace_all_uses_with(result)
    graph.erase_node(node)
