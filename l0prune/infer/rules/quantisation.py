"""Quantisation that is only simulated: numbers stay numbers, rounded to a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.fx import Node

from l0prune.infer.nodes import argument, operator_name
from l0prune.infer.registry import Value, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.rules.pointwise import pointwise, zero_when_tried

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference

_LEARNED = "aten._fake_quantize_learnable_per_channel_affine"

rule("aten.fake_quantize_per_tensor_affine", zero=zero_when_tried)(pointwise)


def _on_the_grid(node: Node, operands: Sequence[bool | None]) -> bool:
    """Zero stays where the grid has a point there: where the zero point is a whole number.

    torch wants such a one among the grid's points, and rounds one that is learned.
    """
    point = node.args[2]
    value = point.meta.get("val") if isinstance(point, Node) else None
    is_whole = isinstance(value, Tensor) and not value.is_floating_point()
    learned = operator_name(node.target) == _LEARNED
    return (is_whole or learned) and operands[0] is True


@rule("aten.fake_quantize_per_channel_affine", _LEARNED, zero=_on_the_grid)
def by_channel(infer: Inference, node: Node) -> Value:
    """Each slot of one dim has a grid of its own."""
    axis = int(argument(node, 3, "axis"))
    dims = infer.dims(source(node))
    for grid in node.args[1:3]:
        if isinstance(grid, Node):
            infer.solver.unify(dims[axis], infer.dims(grid)[0])
    return infer.dims(source(node))
