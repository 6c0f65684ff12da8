"""Files that differ by what an exporter folds, or by how it writes a Split, become alike."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from l0prune.features.latency.normal_form import in_normal_form


def output_of(model, x):
    (result,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return result


def model_of(nodes, inner, x, y, constants=()):
    """A model of these nodes, with the shapes of its inner values, its input and its output."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inner.items()]
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (x, y)]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants]
    graph = helper.make_graph(nodes, "graph", *ends, tensors, value_info=values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_a_split_by_number_is_one_by_sizes():
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    inner = {"a": [2, 3], "b": [2, 3]}
    by_number = model_of(nodes, inner, ("x", [2, 6]), ("y", [2, 3]))
    by_sizes = in_normal_form(by_number)
    assert [a.name for a in by_sizes.graph.node[0].attribute] == ["axis"]
    (sizes,) = by_sizes.graph.initializer
    assert numpy_helper.to_array(sizes).tolist() == [3, 3]
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert np.array_equal(output_of(by_number, x), output_of(by_sizes, x))


def test_what_depends_on_no_input_is_folded():
    """A table's rows by index, put in another order: folded up to a size by some exporters."""
    table = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    constants = [("table", table), ("rows", np.array([4, 0, 0, 2])), ("two", np.float32([2]))]
    nodes = [
        helper.make_node("Gather", ["table", "rows"], ["picked"]),
        helper.make_node("Transpose", ["picked"], ["bias"], perm=[1, 0]),
        helper.make_node("Mul", ["x", "two"], ["double"]),
        helper.make_node("Add", ["double", "bias"], ["y"]),
    ]
    model = model_of(nodes, {}, ("x", [3, 4]), ("y", [3, 4]), constants)
    folded = in_normal_form(model)
    assert [node.op_type for node in folded.graph.node] == ["Mul", "Add"]
    assert {tensor.name for tensor in folded.graph.initializer} == {"bias", "two"}
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    assert np.array_equal(output_of(model, x), output_of(folded, x))
    assert len(model.graph.node) == 4
