"""Operators that have a form on integers, against files that compute them in float32."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from l0prune.features.int8 import quantizer
from l0prune.features.int8.quantizer import MINMAX, Quantizer

RANDOM = np.random.RandomState(1)


def swishes(alpha=1 / 6, beta=0.5):
    """Two layers with a hard swish between them, then a product with a number and a quotient."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first"),
        helper.make_node("HardSigmoid", ["a"], ["h"], name="hard", alpha=alpha, beta=beta),
        helper.make_node("Mul", ["a", "h"], ["s"], name="swish"),
        helper.make_node("Conv", ["s", "v"], ["b"], name="second"),
        helper.make_node("Mul", ["third", "b"], ["m"], name="part"),
        helper.make_node("Div", ["m", "seven"], ["d"], name="share"),
        helper.make_node("Conv", ["d", "u"], ["y"], name="last"),
    ]
    shapes = {"w": (6, 3, 3, 3), "v": (5, 6, 1, 1), "u": (4, 5, 1, 1)}
    weights = {name: RANDOM.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    weights |= {"third": np.float32(1 / 3), "seven": np.array([7], np.float32)}
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 9, 9])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def ran(model, x, folder):
    """Outputs, and the operators that ONNX Runtime runs."""
    options, path = onnxruntime.SessionOptions(), folder / "optimized.onnx"
    options.optimized_model_filepath, options.log_severity_level = str(path), 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (answer,) = session.run(None, {"x": x})
    return answer, [node.op_type for node in onnx.load(path).graph.node]


def both(model, folder, monkeypatch):
    """The file in eight bits with and without forms on integers, and inputs."""
    x = RANDOM.standard_normal((8, 3, 9, 9)).astype("f")
    onnx.save(model, str(folder / "network.onnx"))
    made = Quantizer.of(folder / "network.onnx", [{"x": x}], folder, (MINMAX,))
    found = made.quantized()
    onnx.checker.check_model(found)
    monkeypatch.setattr(quantizer, "in_integers", lambda model: None)
    return found, made.quantized(), x


def test_hard_swishes_and_products_with_numbers_stay_on_integers(tmp_path, monkeypatch):
    found, plain, x = both(swishes(), tmp_path, monkeypatch)
    answer, operators = ran(found, x, tmp_path)
    expected, before = ran(plain, x, tmp_path)
    assert {"HardSigmoid", "Div"} <= {*before}
    assert [each for each in operators if each != "Transpose"] == [
        "QuantizeLinear", "QLinearConv", "QLinearAdd", "QLinearMul", "QLinearConv", "QLinearConv",
        "DequantizeLinear",
    ]  # fmt: skip
    exact, _ = ran(swishes_of(tmp_path), x, tmp_path)
    off = np.abs(expected - exact).max()
    assert off > 0
    assert np.abs(answer - exact).max() <= 1.25 * off
    assert np.abs(answer - expected).max() <= off


def swishes_of(folder):
    return onnx.load(str(folder / "network.onnx"))


@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_a_sum_that_a_scale_cannot_say_stays_in_float32(beta, tmp_path, monkeypatch):
    found, plain, x = both(swishes(beta=beta), tmp_path, monkeypatch)
    assert "HardSigmoid" in [node.op_type for node in found.graph.node]
    assert "Div" not in [node.op_type for node in found.graph.node]
    answer, expected = (ran(model, x, tmp_path)[0] for model in (found, plain))
    assert np.allclose(answer, expected, atol=0.1 * np.abs(expected).max())
