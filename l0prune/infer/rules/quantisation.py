"""Quantisation that is only simulated: numbers stay numbers, rounded to a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.nodes import argument
from l0prune.infer.registry import Value, of_operand, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.rules.pointwise import pointwise, zero_when_tried

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference

rule("aten.fake_quantize_per_tensor_affine", zero=zero_when_tried)(pointwise)


# The grid has a point at zero: torch wants the zero point among the grid's points.
@rule("aten.fake_quantize_per_channel_affine", zero=of_operand(0))
def by_channel(infer: Inference, node: Node) -> Value:
    """Each slot of one dim has a grid of its own."""
    axis = int(argument(node, 3, "axis"))
    dims = infer.dims(source(node))
    for grid in node.args[1:3]:
        if isinstance(grid, Node):
            infer.solver.unify(dims[axis], infer.dims(grid)[0])
    return infer.dims(source(node))
