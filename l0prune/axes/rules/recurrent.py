"""Recurrent layers: their sizes stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.axes.nodes import operands_of
from l0prune.axes.registry import Value, rule

if TYPE_CHECKING:
    from l0prune.axes.inference import Inference


@rule("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def recurrent(infer: Inference, node: Node) -> Value:
    """Gates of one layer share fused weights, and the hidden state feeds back into itself."""
    for operand in operands_of(node):
        infer.pin_all(operand, "a recurrent layer reads it, whose sizes stay whole")
    return infer.opaque(node, "a result of a recurrent layer")
