"""LayerNorm: exact over the slots that stay, where the others are zero.

A slot that is zero adds nothing to the sum and ``mean²`` to the sum of squares, so the statistics
over all slots follow from those that stay: ``exporting/slicing/layernorm.py`` computes them so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.nodes import argument
from l0prune.infer.registry import Value, affine, rule
from l0prune.infer.rules.movement import source

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


@rule("aten.layer_norm", zero=affine(2))
def layer_norm(infer: Inference, node: Node) -> Value:
    """Statistics over the last dims read them without a weight."""
    dims = infer.dims(source(node))
    over = len(node.args[1])  # type: ignore[arg-type]
    for operand in (argument(node, 2, "weight"), argument(node, 3, "bias")):
        if isinstance(operand, Node):
            for mine, theirs in zip(dims[-over:], infer.dims(operand), strict=True):
                infer.solver.unify(mine, theirs)
    for dim in dims[-over:]:
        infer.read(dim, node, None, source(node), why="{who} averages over it", stays=True)
    return infer.dims(source(node))
