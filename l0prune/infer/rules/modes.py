"""Parts of a forward that run under a mode of their own and could not be put in line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.nodes import operands_of
from l0prune.infer.registry import Value, rule

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


@rule("wrap_with_autocast")
def under_autocast(infer: Inference, node: Node) -> Value:
    """Under autocast something in it does more than cast its operands: it stays as it is."""
    why = "it runs under torch.autocast, where an operator does more than cast what it is given"
    for operand in operands_of(node):
        infer.pin_all(operand, why)
    return infer.opaque(node, "a result of operators under torch.autocast")
