"""Recurrent layers: what they read can be cut, their own sizes stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.nodes import argument, operands_of, shape_of
from l0prune.infer.registry import Value, rule

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


@rule("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def recurrent(infer: Inference, node: Node) -> Value:
    """Gates of one layer share fused weights, and the hidden state feeds back into itself.

    The first layer multiplies its input with the columns of a weight for each direction. Those
    weights cannot carry gates, since ``nn.LSTM`` and its like keep references to them.
    """
    x, _, given, *_ = node.args
    assert isinstance(x, Node)
    assert isinstance(given, list | tuple)  # a packed sequence comes otherwise, and pins
    weights = [each for each in given if isinstance(each, Node)]
    first = weights[: len(weights) // int(argument(node, 4, "num_layers"))]
    readers = first[:: len(first) // (2 if argument(node, 7, "bidirectional") else 1)]
    read = {(x, len(shape_of(x) or []) - 1)} | {(weight, 1) for weight in readers}
    for operand in operands_of(node):
        for number, dim in enumerate(infer.dims(operand)):
            if (operand, number) not in read:
                infer.solver.pin(dim, "a recurrent layer reads it, whose sizes stay whole")
    *before, inner = infer.dims(x)
    for weight in readers:
        infer.solver.unify(inner, infer.dims(weight)[1])
    infer.read(inner, node, None, x, why="{who} reads it")
    for weight in weights:
        rows, *columns = infer.dims(weight)
        infer.write(rows, node, weight, 0)
        if columns:
            infer.work(node, (*before, *columns, rows), weight=weight)
    return infer.opaque(node, "a result of a recurrent layer")
