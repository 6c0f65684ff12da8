"""OpenVINO as a runtime of ONNX files."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from l0prune.errors import UsageError
from l0prune.features.latency.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("openvino")


def test_files_and_their_nodes_are_timed(tmp_path):
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["n00000_0"], name="n00000_"),
        helper.make_node("Softmax", ["n00000_0"], ["n00001_0"], name="n00001_"),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [32, 64])
        for name in ("x", "n00001_0")
    ]
    graph = helper.make_graph(
        nodes, "network", values[:1], values[1:], [numpy_helper.from_array(weight, "w")]
    )
    path = tmp_path / "network.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        str(path),
    )
    runtime = runtime_of("openvino")
    inputs = {"x": np.ones((32, 64), np.float32)}
    assert runtime.load(path, 1, runtime.provider).median(inputs, 3) > 0
    found = runtime.nodes(path, inputs, 3, 1, runtime.provider)
    assert {"00000", "00001"} <= set(found)
    assert all(ms >= 0 for ms in found.values())


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="OpenVINO has no TPU here, but CPU"):
        runtime_of("openvino-int8", "TPU")
