"""Folding of graphs, without loading them as networks."""

import numpy as np
import onnx
from onnx_files import draws, node, written

from l0prune.features.onnx_in.folding import folded


def kinds_and_weights(nodes, weights, tmp_path, sizes=("batch", 4), outputs=("y",)):
    path = written(tmp_path / "net.onnx", nodes, weights, sizes, outputs=outputs)
    graph = folded(onnx.load(path)).graph
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    return [each.op_type for each in graph.node if each.op_type != "Constant"], arrays


def test_weights_that_are_computed_become_arrays_of_any_size(tmp_path):
    v, g = draws(40, 300), np.abs(draws(1, 300)) + 1
    nodes = [
        node("ReduceL2", "v zero", "n"),
        node("Div", "v n", "u"),
        node("Mul", "u g", "w"),
        node("MatMul", "x w", "y"),
    ]
    weights = {"v": v, "g": g, "zero": np.array([0])}
    found, arrays = kinds_and_weights(nodes, weights, tmp_path, ("batch", 40))
    assert found == ["MatMul"]
    np.testing.assert_allclose(arrays["w"], v / np.linalg.norm(v, axis=0) * g, rtol=1e-5)


def test_parts_of_a_weight_are_folded_and_copies_are_not(tmp_path):
    weights = {
        "w": draws(8, 24), "zero": np.array([0]), "half": np.array([12]), "end": np.array([24]),
        "one": np.array([1]),
    }  # fmt: skip
    parts = [
        node("Slice", "w zero half one", "a"),
        node("Slice", "w half end one", "b"),
        node("MatMul", "x a", "m"),
        node("MatMul", "x b", "k"),
        node("Mul", "m k", "y"),
    ]
    found, arrays = kinds_and_weights(parts, weights, tmp_path, ("batch", 8))
    assert found == ["MatMul", "MatMul", "Mul"]
    np.testing.assert_array_equal(np.hstack([arrays["a"], arrays["b"]]), weights["w"])
    both = [
        node("MatMul", "x w", "h"),
        node("Transpose", "w", "v", perm=[1, 0]),
        node("MatMul", "h v", "y"),
    ]
    found, arrays = kinds_and_weights(both, {"w": weights["w"]}, tmp_path, ("batch", 8))
    assert sorted(found) == ["MatMul", "MatMul", "Transpose"]
    assert list(arrays) == ["w"]


def test_what_grows_is_left(tmp_path):
    nodes = [
        node("Expand", "w s", "e"),
        node("ReduceSum", "e two", "t", keepdims=0),
        node("MatMul", "x t", "y"),
    ]
    weights = {"w": draws(1, 8, 9), "s": np.array([4000, 8, 9]), "two": np.array([0])}
    found, arrays = kinds_and_weights(nodes, weights, tmp_path, ("batch", 8))
    assert found == ["Expand", "ReduceSum", "MatMul"]
    assert "e" not in arrays
