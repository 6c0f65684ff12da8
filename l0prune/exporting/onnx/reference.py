"""ONNX files in float64, by the reference implementation that the onnx package brings.

A runtime may round far more than PyTorch, as by a norm that takes mean and variance in one pass.
In float64 that is gone: a file that was translated wrongly stays wrong, any other one is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from torch import Tensor

from l0prune.progress.stages import stage

_OF_TYPE = ("to", "dtype")  # attributes that name the type of an output


@stage("running the ONNX file in float64, by onnx's reference implementation")
def run_in_float64(path: Path, inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a file whose values are all float64 where they were float32.

    Slow: it runs in numpy.

    Args:
        path: of the file.
        inputs: in the order of the file's.

    Raises:
        Exception: of many classes; the reference implementation does not know an operator.
    """
    from onnx.reference import ReferenceEvaluator  # loads slowly

    model = onnx.load(str(path))
    widen(model)
    names = [each.name for each in model.graph.input]
    given = [each.double() if each.is_floating_point() else each for each in inputs]
    feed = dict(zip(names, (each.numpy() for each in given), strict=True))
    found = ReferenceEvaluator(model).run(None, feed)
    return [torch.as_tensor(np.asarray(each)) for each in found]


def widen(model: ModelProto) -> None:
    """Let all values of a file that are float32 be float64, in place."""
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_nodes(function.node)


def _widen_graph(graph: GraphProto) -> None:
    for tensor in graph.initializer:
        _widen(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        if node.op_type == "ConstantOfShape" and not node.attribute:  # zeros in float32
            node.attribute.append(onnx.helper.make_attribute("value", _tensor(np.zeros(1))))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _widen_graph(attribute.g)
            elif attribute.type == AttributeProto.TENSOR:
                _widen(attribute.t)
            elif attribute.name in _OF_TYPE and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            elif node.op_type == "Constant" and attribute.name.startswith("value_float"):
                is_single = attribute.name == "value_float"
                value = attribute.f if is_single else [*attribute.floats]
                node.attribute.remove(attribute)
                node.attribute.append(onnx.helper.make_attribute("value", _tensor(value)))
                break


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(_tensor(numpy_helper.to_array(tensor), tensor.name))


def _tensor(value: Any, name: str = "") -> TensorProto:
    return numpy_helper.from_array(np.asarray(value, np.float64), name)
