"""Subnormal weights of an ONNX file, which the exporter makes when it folds one into another.

A BatchNorm is folded into the convolution before it, a scale into a weight: products of normal
numbers may be subnormal ones. (See ``slicing.subnormal`` for why they are flushed.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from l0prune.exporting.slicing.subnormal import SMALLEST

if TYPE_CHECKING:
    import onnx_ir

# Operators that multiply with a number or add it. Zero is as good there as what is subnormal, which
# it is not in a quotient, a logarithm or a variance.
_LINEAR = frozenset(
    ("Add", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "Mul", "RNN", "Sub")
)
_SHAPING = frozenset(("Expand", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"))


def flush_weights(model: onnx_ir.Model) -> None:
    """Let subnormal weights of float32 be zero, in place, if only sums of products read them."""
    import onnx_ir

    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or not _is_linear(value):
                continue
            numbers = tensor.numpy()
            size = np.abs(numbers)
            subnormal = (size < SMALLEST) & (size > 0)
            if subnormal.any():
                flushed = np.where(subnormal, np.float32(0), numbers)
                value.const_value = onnx_ir.tensor(flushed, name=value.name)


def _is_linear(value: onnx_ir.Value) -> bool:
    """Is it read by such operators alone, also by way of another shape?"""
    if value.is_graph_output():
        return False
    return all(
        node.op_type in _LINEAR
        or (node.op_type in _SHAPING and all(_is_linear(output) for output in node.outputs))
        for node in value.consumers()
    )
