"""Int8 files whose weights make up for the rounding: convolutions and matrices, by hand."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from test_int8 import file, run

from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.differences import relative_error
from l0prune.features.int8 import compensation
from l0prune.features.int8.compensation import compensated
from l0prune.features.int8.quantizer import MINMAX, Quantizer
from l0prune.features.int8.search import Comparison, Search

SHAPE, POINTS = (4, 6, 7), ("first", "second", "head")
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _in_any_order():
    anew()


def anew():
    """Draw the same numbers whatever was drawn before."""
    RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state


def numbers(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def network():
    """A convolution with stride and uneven pads, one in groups, and a matrix."""
    first = {"strides": [2, 1], "pads": [1, 0, 0, 1], "dilations": [1, 2]}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="first", **first),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], name="second", group=2),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("Flatten", ["r2"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], name="head", transB=1),
    ]
    w3 = numbers(3, 6 * 2 * 5)
    weights = {"w1": numbers(8, 4, 2, 2), "w2": numbers(6, 4, 2, 2), "w3": w3}
    weights |= {f"b{i}": numbers(n) for i, n in enumerate((8, 6, 3), 1)}
    return file(nodes, weights, SHAPE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files in float32 and in eight bits, without and with compensation, and the feeds."""
    anew()
    feeds = [{"x": numbers(8, 1, 6, 7) + 0.1 * numbers(8, *SHAPE)} for _ in range(8)]
    quantizer = quantizer_of(network(), feeds, tmp_path_factory.mktemp("files"))
    made = quantizer.quantized(MINMAX)
    return quantizer.model, made, compensated(quantizer.model, made, feeds), feeds


def quantizer_of(model, feeds, folder):
    onnx.save(model, str(folder / "network.onnx"))
    return Quantizer.of(folder / "network.onnx", feeds, folder, (MINMAX,))


def value(model, name, feeds):
    """A value within a file, of all feeds."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    copied.graph.output.append(helper.make_empty_tensor_value_info(name))
    return np.concatenate([run(copied, feed["x"])[-1] for feed in feeds])


def layer(model, name):
    """A node, its weight and its bias, the last two in float32."""
    (node,) = (each for each in model.graph.node if each.name == name)
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    makers = {n.output[0]: n for n in model.graph.node if n.op_type == "DequantizeLinear"}
    found = []
    for given in node.input[1:]:
        whole, step, *_ = (tensors[each] for each in makers[given].input)
        found.append((whole * step.reshape([-1] + [1] * (whole.ndim - 1))).astype(np.float32))
    return node, *map(torch.tensor, found)


def output(node, x, weight, bias):
    x = torch.from_numpy(x)
    if node.name == "first":
        return F.conv2d(F.pad(x, (0, 1, 1, 0)), weight, bias, (2, 1), 0, (1, 2))
    return F.conv2d(x, weight, bias, groups=2) if node.name == "second" else x @ weight.T + bias


@pytest.mark.parametrize("name", POINTS)
def test_the_mean_of_each_output_is_that_in_float32(files, name):
    single, plain, better, feeds = files
    (exact,) = (each.output[0] for each in single.graph.node if each.name == name)
    wanted = torch.from_numpy(value(single, exact, feeds))
    dims = [d for d in range(wanted.dim()) if d != 1]
    left = []
    for model in (plain, better):
        node, weight, bias = layer(model, name)
        found = output(node, value(model, node.input[0], feeds), weight, bias)
        left.append(((found - wanted).mean(dims).abs().max(), (found - wanted).square().mean()))
    assert left[1][0] < 2e-4 * wanted.abs().max()
    assert left[1][0] < 0.1 * left[0][0]
    assert left[1][1] < 0.9 * left[0][1]


def test_only_weights_and_biases_change_and_stay_on_their_grid(files):
    _, plain, better, _ = files
    before, after = ({t.name: t for t in m.graph.initializer} for m in (plain, better))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{n}{i}_quantized" for n in "wb" for i in (1, 2, 3)}
    assert [*plain.graph.node] == [*better.graph.node]
    for name in ("w1_quantized", "w2_quantized", "w3_quantized"):
        whole, old = (numpy_helper.to_array(t[name]) for t in (after, before))
        assert whole.dtype == np.int8
        assert np.abs(whole).max() <= np.abs(old).max()


def test_a_weight_that_several_read_and_one_in_float32_stay(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="one"),
        helper.make_node("MatMul", ["h", "w"], ["g"], name="two"),
        helper.make_node("MatMul", ["g", "v"], ["y"], name="kept"),
    ]
    feeds = [{"x": numbers(20, 6)} for _ in range(4)]
    model = file(nodes, {"w": numbers(6, 6), "v": numbers(6, 3)}, (6,))
    quantizer = quantizer_of(model, feeds, tmp_path)
    made = quantizer.quantized(MINMAX, ["kept"])
    assert compensated(quantizer.model, made, feeds) == made


def test_one_step_for_all_may_be_a_vector_of_one(files):
    single, plain, _, feeds = files
    changed = onnx.ModelProto()
    changed.CopyFrom(plain)
    (node,) = (n for n in changed.graph.node if n.output[0] == layer_input(plain, "head", 2))
    (step,) = (t for t in changed.graph.initializer if t.name == node.input[1])
    value = numpy_helper.to_array(step).reshape(-1)[:1]
    step.CopyFrom(numpy_helper.from_array(value, step.name))
    (zero,) = (t for t in changed.graph.initializer if t.name == node.input[2])
    zero.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int32), zero.name))
    del node.attribute[:]
    assert compensated(single, changed, feeds) != changed


def layer_input(model, name, number):
    return next(node.input[number] for node in model.graph.node if node.name == name)


def test_of_very_wide_layers_the_bias_alone_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(compensation, "_MOST", 5)
    weight = numbers(2, 6)
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="wide", transB=1)
    model = file([node], {"w": weight, "b": numbers(2)}, weight.shape[1:])
    feeds = [{"x": np.abs(numbers(20, 6))} for _ in range(4)]
    quantizer = quantizer_of(model, feeds, tmp_path)
    made = quantizer.quantized(MINMAX)
    better = compensated(quantizer.model, made, feeds)
    _, old, _ = layer(made, "wide")
    node, new, bias = layer(better, "wide")
    assert torch.equal(old, new)
    x = np.concatenate([feed["x"] for feed in feeds])
    wanted = torch.from_numpy(run(quantizer.model, x)[0])
    read = torch.from_numpy(value(better, node.input[0], feeds))
    torch.testing.assert_close(bias, (wanted - read @ new.T).mean(0), rtol=1e-3, atol=1e-3)


def test_the_search_takes_them_where_the_error_is_less(tmp_path, files):
    *_, feeds = files
    quantizer = quantizer_of(network(), feeds[:6], tmp_path)
    single = collect.Network(tmp_path / "network.onnx", 1, collect.CPU)
    search = Search(quantizer, Comparison(single, feeds[6:]), tmp_path / "tried.onnx")
    plain = search.made()
    search.compensate(feeds[:6])
    pairs = [(run(quantizer.model, f["x"])[0], run(search.made(), f["x"])[0]) for f in feeds[6:]]
    assert relative_error(pairs) == pytest.approx(min(search.compensated), rel=1e-4)
    assert (search.made() != plain) == (search.compensated[1] < search.compensated[0])
