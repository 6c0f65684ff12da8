"""Small ONNX files, made node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def node(kind: str, inputs: str, outputs: str, domain: str = "", **attributes: Any):
    """One node; inputs and outputs are names with spaces between, ``-`` for one left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(kind, names, outputs.split(), domain=domain, **attributes)


def written(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Any] | None = None,
    sizes: Sequence[int | str] = ("batch", 4),
    kind: int = FLOAT,
    opset: int = 18,
    outputs: Sequence[str] = ("y",),
    more: Mapping[str, Sequence[int | str]] | None = None,
) -> str:
    """Write a file that takes ``x`` and gives ``y``; return its path."""
    arrays = [numpy_helper.from_array(np.asarray(v), name) for name, v in (weights or {}).items()]
    inputs = {"x": sizes, **(more or {})}
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info(name, kind, of) for name, of in inputs.items()],
        [onnx.helper.make_empty_tensor_value_info(name) for name in outputs],
        initializer=arrays,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("made.up", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = FLOAT
    onnx.save(model, str(path))
    return str(path)


def draws(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers of float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
