"""Weights that operators of an ONNX file read as they are and transposed: they are stored once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir


def share_transposed(model: onnx_ir.Model) -> None:
    """Store a matrix once whose transpose is read, too, in place.

    The exporter folds the transpose of a tied head that is small, beside the table itself.
    """
    import onnx_ir

    graph = model.graph
    for kept, copy in _pairs(list(graph.initializers.values())):
        node = onnx_ir.node("Transpose", [kept], {"perm": [1, 0]})
        graph.insert_before(graph[0], node)
        (out,) = node.outputs
        out.shape, out.type = copy.shape, copy.type
        del graph.initializers[copy.name or ""]
        copy.replace_all_uses_with(out)
        out.name = copy.name


def _pairs(values: list[onnx_ir.Value]) -> Iterator[tuple[onnx_ir.Value, onnx_ir.Value]]:
    """Yield pairs of matrices of which the second, which no other pair has, is the transpose."""
    of_shape: dict[tuple[Any, ...], list[onnx_ir.Value]] = {}
    for value in values:
        array = _matrix(value)
        if array is None:
            continue
        others = of_shape.get(array.shape[::-1], ())
        same = (other for other in others if _are_transposed(_matrix(other), array))
        if (kept := next(same, None)) is not None:
            yield kept, value
        else:
            of_shape.setdefault(array.shape, []).append(value)


def _matrix(value: onnx_ir.Value) -> np.ndarray[Any, Any] | None:
    if value.const_value is None or value.is_graph_output():
        return None
    array = value.const_value.numpy()
    return array if array.ndim == 2 and min(array.shape) > 1 else None


def _are_transposed(one: Any, other: Any) -> bool:
    same = one.dtype == other.dtype and np.array_equal(one[0], other[:, 0])
    return bool(same and np.array_equal(one, other.T))
