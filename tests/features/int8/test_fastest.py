"""Layers of int8 files in float32 since that is faster, by times that are made up."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.differences import relative_error
from l0prune.features.int8 import fastest
from l0prune.features.int8.fastest import Fastest, with_small_weights
from l0prune.features.int8.float_regions import NodeTimes
from l0prune.features.int8.quantizer import MINMAX, Quantizer
from l0prune.features.int8.search import Comparison, Search

RANDOM = np.random.RandomState(2)
LAYERS = ("first", "second", "third", "fourth")


def network():
    """Four layers, with an operator in the middle that has no kernel on integers."""
    numbers = RANDOM.standard_normal((4, 32, 32))
    weights = {f"w{n}": np.linalg.qr(each)[0].astype("f") for n, each in enumerate(numbers)}
    read, nodes = "x", []
    for number, (name, weight) in enumerate(zip(LAYERS, weights, strict=True)):
        nodes.append(helper.make_node("MatMul", [read, weight], [f"h{number}"], name=name))
        read = f"h{number}"
        if number == 1:
            nodes.append(helper.make_node("Softplus", [read], ["curved"], name="curve"))
            read = "curved"
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 32])],
        [helper.make_tensor_value_info("h3", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def in_float32(path):
    """Names of the layers that a file computes in float32."""
    model = onnx.load(str(path))
    tensors = {tensor.name for tensor in model.graph.initializer if tensor.data_type == 1}
    tensors |= {n.output[0] for n in model.graph.node if n.op_type == "Mul"}
    return {n.name for n in model.graph.node if n.name in LAYERS and n.input[1] in tensors}


@pytest.fixture
def made_up(monkeypatch):
    """Milliseconds of each layer in float32 and on integers; a file takes their sum."""
    times = dict(zip(LAYERS, [(1.0, 0.2), (1.0, 0.9), (1.0, 1.4), (1.0, 0.98)], strict=True))

    def profiled(self, name):
        single = in_float32(self._folder / f"{name}.onnx")
        ms = {layer: times[layer][layer not in single] for layer in LAYERS} | {"curve": 0.1}
        conversions = [(32, 0.05), (32, 0.05)]
        return NodeTimes(ms, {*LAYERS} - single, set(), dict.fromkeys(ms, 32), conversions)

    def turns(networks, seconds):
        return {name: [each(1)] * 3 for name, each in networks.items()}

    def median(self, name):
        profile = profiled(self, name)
        return lambda runs: sum(profile.ms.values())

    monkeypatch.setattr(Fastest, "_profile", profiled)
    monkeypatch.setattr(Fastest, "_median", median)
    monkeypatch.setattr(fastest, "in_turns", turns)
    return times


def searched(folder):
    model, inputs = network(), RANDOM.standard_normal((4, 16, 32)).astype("f")
    feeds = [{"x": each} for each in inputs]
    onnx.save(model, str(folder / "network.onnx"))
    quantizer = Quantizer.of(folder / "network.onnx", feeds[:3], folder, (MINMAX,))
    single = collect.Network(folder / "network.onnx", 1, collect.CPU)
    search = Search(quantizer, Comparison(single, feeds[3:]), folder / "tried.onnx")
    search.keep_slow([feeds[0]["x"][:1]], 1)
    path = folder / "made.onnx"
    path.write_bytes(search.made().SerializeToString())
    made = collect.Network(path, 1, collect.CPU)
    error = relative_error(
        [tuple(of.session.run(None, feed)[0] for of in (single, made)) for feed in feeds]
    )
    return search, path, error


def test_layers_that_are_slower_on_integers_stay_in_float32(made_up, tmp_path):
    search, path, error = searched(tmp_path)
    assert search.kept == ["third", "fourth"]  # the gain of the fourth alone is a conversion's loss
    assert in_float32(path) == {"third", "fourth"}
    assert search.speed == fastest.Speed(4.1, pytest.approx(3.58), pytest.approx(3.2))
    assert 0 < error < 0.05
    matrices = [t for t in onnx.load(str(path)).graph.initializer if [*t.dims] == [32, 32]]
    assert [t.data_type for t in matrices] == [TensorProto.INT8] * 4


def test_all_is_in_float32_where_nothing_is_faster(made_up, tmp_path):
    made_up |= dict.fromkeys(LAYERS, (1.0, 1.2))
    search, path, error = searched(tmp_path)
    assert in_float32(path) == {*LAYERS}
    assert search.speed == fastest.Speed(4.1, pytest.approx(4.9), 4.1, is_all=True)
    assert 0 < error < 0.01
    assert path.stat().st_size < (tmp_path / "network.onnx").stat().st_size / 2
    operators = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert operators == {"Cast", "Mul", "MatMul", "Softplus"}


def test_what_is_about_as_fast_stays_in_eight_bits(made_up, tmp_path):
    made_up |= dict.fromkeys(LAYERS, (1.0, 0.5)) | {"third": (1.0, 1.02)}
    search, path, _ = searched(tmp_path)
    assert (in_float32(path), search.kept) == (set(), [])
    assert search.speed.chosen == search.speed.everywhere == pytest.approx(2.62)


def test_small_weights_are_widened_once_when_a_file_is_loaded(tmp_path):
    conv = RANDOM.standard_normal((16, 8, 3, 3)).astype("f")
    conv[3] = 0
    weights = {
        "c": conv, "t": RANDOM.standard_normal((16, 10, 3, 3)).astype("f"),
        "g": RANDOM.standard_normal((40, 10)).astype("f"),
        "m": RANDOM.standard_normal((40, 64)).astype("f"),
        "few": RANDOM.standard_normal((64, 2)).astype("f"),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "c"], ["a"], name="c"),
        helper.make_node("ConvTranspose", ["a", "t"], ["b"], name="t"),
        helper.make_node("GlobalMaxPool", ["b"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "g"], ["h"], name="g", transB=1),
        helper.make_node("MatMul", ["h", "m"], ["i"], name="m"),
        helper.make_node("MatMul", ["i", "few"], ["y"], name="few"),
    ]
    weights["g"] = np.concatenate([weights["g"]] * 3)
    weights["m"] = np.concatenate([weights["m"]] * 3)
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opset = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    with_small_weights(model, [*weights])
    axes = {"c": 0, "t": 1, "g": 0, "m": 1}
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert np.array_equal(tensors["few"], weights["few"])
    for name, axis in axes.items():
        rows = np.moveaxis(weights[name], axis, 0).reshape(weights[name].shape[axis], -1)
        whole = np.moveaxis(tensors[f"{name}_whole"], axis, 0).reshape(rows.shape)
        steps = tensors[f"{name}_steps"].reshape(-1, 1)
        assert whole.dtype == np.int8
        assert np.abs(whole * steps - rows).max() <= 0.501 * steps.max()
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    loaded = {node.op_type for node in onnx.load(str(tmp_path / "loaded.onnx")).graph.node}
    assert not loaded & {"Cast", "Mul", "DequantizeLinear"}


def test_a_profile_of_a_file_has_all_its_nodes(tmp_path):
    model = network()
    search = Fastest(model, lambda slow: model, LAYERS, [np.ones((1, 32), "f")], 1, tmp_path)
    search._write("float32", model)
    found = search._profile("float32")
    assert {*found.ms} == {*LAYERS, "curve"}
    assert (found.on_integers, found.others, found.conversions) == (set(), set(), [])
    assert found.sizes == dict.fromkeys(found.ms, 32)
