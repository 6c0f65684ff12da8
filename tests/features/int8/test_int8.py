"""Files in eight bits, compared with a quantizer that is written out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.tools import symbolic_shape_infer

from l0prune.capture.sizes import ANY
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.differences import differences, relative_error
from l0prune.exporting.onnx.times import Times, one_example
from l0prune.features.int8.calibration import (
    EXAMPLES,
    divided,
    drawn,
    feeds_of,
    is_source,
    rows_in,
)
from l0prune.features.int8.fastest import Speed
from l0prune.features.int8.file import Int8, Int8File
from l0prune.features.int8.quantizer import (
    METHODS,
    MINMAX,
    Quantizer,
    has_dot_products,
    is_x86,
    name_nodes,
    pool_means,
)
from l0prune.features.int8.search import Comparison, Search, error_of_slices

RANDOM = np.random.RandomState()


@pytest.fixture(autouse=True)
def seeded():
    """Let each test draw the same numbers, whichever ran before."""
    RANDOM.seed(1)


def numbers(*shape, scale=1.0):
    return (scale * RANDOM.standard_normal(shape)).astype(np.float32)


def file(nodes, weights, shape, outputs=("y",), kinds=(), opset=18):
    """An ONNX file with one input, x."""
    kinds = kinds or [TensorProto.FLOAT] * len(outputs)
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info(n, k, None) for n, k in zip(outputs, kinds, strict=True)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run(model, x):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})


def linear(weight, bias):
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    return file([node], {"w": weight, "b": bias}, weight.shape[1:])


def quantizer_of(model, feeds, folder):
    onnx.save(model, str(folder / "network.onnx"))
    return Quantizer.of(folder / "network.onnx", feeds, folder)


def grid(low, high):
    """Scale and zero point of activations: 0 is on the grid."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / 255)
    return scale, int(np.round((0 if is_x86() else -128) - low / scale))


def rounded(x, scale, zero):
    least = 0 if is_x86() else -128
    return (np.clip(np.round(x / scale) + zero, least, least + 255) - zero) * scale


@pytest.mark.skipif(not has_dot_products(), reason="weights have 7 bits here")
def test_a_layer_is_quantized_as_one_would_by_hand(tmp_path):
    weight, bias, x = numbers(5, 8), numbers(5), numbers(40, 8)
    weight[2] *= 30  # a scale of its own
    model = linear(weight, bias)
    (expected,) = run(model, x)
    made = quantizer_of(model, [{"x": x}], tmp_path).quantized(MINMAX)
    scales = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    whole = np.clip(np.round(weight / scales), -127, 127)
    tensors = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    assert np.array_equal(tensors["w_quantized"].astype(np.float32), whole)
    inner = grid(float(x.min()), float(x.max()))
    outer = grid(float(expected.min()), float(expected.max()))
    step = inner[0] * scales[:, 0]
    exact = rounded(x, *inner) @ (whole * scales).T + np.round(bias / step) * step
    (found,) = run(made, x)
    assert np.abs(found - rounded(exact, *outer)).max() <= outer[0] * 1.001  # one step of the grid
    assert np.abs(found - expected).max() > 0


@pytest.mark.parametrize("nothing", [-np.inf, np.finfo(np.float32).min])
def test_infinite_values_stay_in_float32(nothing, tmp_path):
    """As scores of an attention with a mask: they are least where nothing may be read."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"], name="scores"),
        helper.make_node("Mul", ["scores", "half"], ["scaled"], name="scaled"),
        helper.make_node("Add", ["scaled", "mask"], ["masked"], name="masked"),
        helper.make_node("Softmax", ["masked"], ["shares"], name="shares"),
        helper.make_node("MatMul", ["shares", "v"], ["y"], name="y"),
    ]
    mask = np.array([0, nothing, 0], np.float32)
    weights = {"w": numbers(8, 3), "half": np.float32([0.5]), "mask": mask, "v": numbers(3, 5)}
    x = numbers(40, 8)
    model = file(nodes, weights, (8,))
    quantizer = quantizer_of(model, [{"x": x[:20]}, {"x": x[20:]}], tmp_path)
    assert set(quantizer.unfit) == {"masked", "shares"}
    assert {*quantizer.ranges} == {*METHODS}
    assert relative_error([(*run(model, x), *run(quantizer.quantized(MINMAX), x))]) < 0.05


@pytest.mark.parametrize(("times", "apart"), [(300.0, {"joined", "moved"}), (0.5, set())])
def test_outputs_that_join_boxes_and_scores_stay_in_float32(times, apart, tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["boxes"], name="boxes"),
        helper.make_node("MatMul", ["x", "v"], ["logits"], name="logits"),
        helper.make_node("Sigmoid", ["logits"], ["scores"], name="scores"),
        helper.make_node("Concat", ["boxes", "scores"], ["all"], name="joined", axis=1),
        helper.make_node("Transpose", ["all"], ["y"], name="moved", perm=[1, 0]),
    ]
    w = numbers(8, 4)
    model = file(nodes, {"w": w * np.float32(times), "v": numbers(8, 3)}, (8,))
    x = numbers(40, 8)
    quantizer = quantizer_of(model, [{"x": x}], tmp_path)
    assert set(quantizer.unfit) == apart
    (exact,), (found,) = run(model, x), run(quantizer.quantized(MINMAX), x)
    assert relative_error([(exact[4:], found[4:])]) < 0.05


def test_errors_of_slices_are_relative_to_their_own_sizes():
    exact = np.float32([[[100, 100], [1, 0], [0, 0]]])  # boxes, scores, and a class that is nowhere
    assert error_of_slices([(exact, exact)]) == 0
    found = exact * np.float32([[[1], [0.5], [1]]])
    assert relative_error([(exact, found)]) < 0.005
    assert error_of_slices([(exact, found)]) == pytest.approx(np.sqrt(0.25 / 2))
    found[0, 1, 0] = 9  # no slice is worse than if it were 0
    assert error_of_slices([(exact, found)]) == pytest.approx(np.sqrt(1 / 2))


def test_calibration_leaves_no_files_where_it_is_called(tmp_path, monkeypatch):
    """As if ONNX Runtime's inference of symbolic shapes did not come to an end."""

    def stop(self, *args):
        self.run_ = False
        return False

    monkeypatch.setattr(symbolic_shape_infer.SymbolicShapeInference, "_infer_impl", stop)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    quantizer_of(linear(numbers(5, 8), numbers(5)), [{"x": numbers(4, 8)}], tmp_path)
    assert not [*(tmp_path / "here").iterdir()]


def test_means_over_all_places_are_pooled_and_stay_the_same():
    x = numbers(2, 3, 4, 5)
    nodes = [
        helper.make_node("ReduceMean", ["x", "places"], ["a"], keepdims=1),
        helper.make_node("ReduceMean", ["x", "one"], ["b"], keepdims=1),
        helper.make_node("ReduceMean", ["x", "places"], ["c"], keepdims=0),
    ]
    weights = {"places": np.array([-1, 2]), "one": np.array([3])}
    model = file(nodes, weights, (3, 4, 5), ("a", "b", "c"))
    before = run(model, x)
    pool_means(model)
    assert [n.op_type for n in model.graph.node] == ["GlobalAveragePool", *["ReduceMean"] * 2]
    for a, b in zip(before, run(model, x), strict=True):
        assert np.allclose(a, b, atol=1e-6)


def test_examples_of_inputs_alone_are_drawn_from_all():
    x = torch.arange(1000)
    found = drawn({"x": x[:, None], "y": x})
    assert len(found["y"]) == EXAMPLES == len({*found["y"].tolist()})
    assert torch.equal(found["x"][:, 0], found["y"])
    assert int(found["y"].max()) > 900
    assert sorted(drawn(x[:5]).tolist()) == [0, 1, 2, 3, 4]


def test_every_node_has_a_name_of_its_own():
    model = file([helper.make_node("Relu", ["x"], [n], name="a") for n in "yz"], {}, (2,), "yz")
    name_nodes(model)
    assert [node.name for node in model.graph.node] == ["a", "Relu_1"]


def searched(model, folder):
    """The search for a network, the error in eight bits throughout, and that of the result."""
    feeds = [{"x": numbers(16, 6)} for _ in range(4)]
    quantizer = quantizer_of(model, feeds[:3], folder)
    network = collect.Network(folder / "network.onnx", 1, collect.CPU)
    search = Search(quantizer, Comparison(network, feeds[3:]), folder / "tried.onnx")
    before = search._error([], MINMAX)
    search.run()
    x = feeds[3]["x"]
    return search, before, relative_error([(*run(model, x), *run(search.made(), x))])


OUTLIER = np.array([3000, 1, 1, 1, 1, 1], np.float32)


def test_kinds_of_operators_that_cost_most_stay_in_float32_together(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="first"),
        helper.make_node("Mul", ["r", "outlier"], ["h"], name="widen"),
        helper.make_node("Add", ["h", "shift"], ["s"], name="sum"),
        helper.make_node("Mul", ["s", "mask"], ["m"], name="narrow"),
        helper.make_node("Gemm", ["m", "head"], ["y"], name="head", transB=1),
    ]
    mask, shift = np.float32(OUTLIER == 1), np.ones(6, np.float32)
    weights = {"outlier": OUTLIER, "mask": mask, "shift": shift, "head": numbers(4, 6)}
    search, before, error = searched(file(nodes, weights, (6,)), tmp_path)
    assert before > 0.3
    assert error < 0.05
    assert search.kept == ["Add", "Mul"]
    assert search.costly == []


def test_layers_that_cost_most_are_named_and_stay_in_float32(tmp_path):
    names = [f"w{number}" for number in range(8)]
    nodes = [
        helper.make_node("Gemm", [f"h{i}" if i else "x", name], [f"h{i + 1}"], name=f"layer{i}")
        for i, name in enumerate(names)
    ]
    weights = {name: np.linalg.qr(numbers(6, 6))[0] for name in names}
    weights["w3"] = weights["w3"] * OUTLIER
    weights["w4"][0] = 0  # what is large is not read
    search, before, error = searched(file(nodes, weights, (6,), ("h8",)), tmp_path)
    assert before > 0.3
    assert error < 0.05
    assert sorted(search.kept) == ["layer3", "layer4"]
    assert {name for name, _ in search.costly[:2]} == {"layer3", "layer4"}
    assert search.costly[0][1] > 0.3


def test_nothing_stays_in_float32_where_eight_bits_are_enough(tmp_path):
    search, before, error = searched(linear(numbers(5, 6), numbers(5)), tmp_path)
    assert error <= before < 0.05
    assert (search.kept, search.costly) == ([], [])
    assert search.method in METHODS


def test_errors_are_relative_and_leave_out_what_is_infinite():
    a = np.array([3.0, 4.0, -np.inf], np.float32)
    b = np.array([3.0, 4.5, 7.0], np.float32)
    assert relative_error([(a, b)]) == pytest.approx(0.1)
    assert relative_error([(a[:2], np.array([3.0, np.inf], np.float32))]) == float("inf")
    assert relative_error([(0 * a[:2], 0 * a[:2])]) == 0


def test_outputs_of_whole_numbers_are_counted_where_they_are_equal():
    scores = np.array([[1.0, 2.0], [4.0, 3.0]], np.float32)
    other = np.array([[1.5, 2.0], [3.0, 4.0]], np.float32)
    classes = np.array([1, 0])
    one = np.array([1.0, 2.0], np.float32)
    errors, agreement = differences(
        ["scores", "classes", "one"], [[scores, classes, one]], [[other, np.array([1, 1]), one]]
    )
    assert errors == {"scores": pytest.approx(np.sqrt(2.25 / 30)), "classes": None, "one": 0.0}
    assert agreement == {"scores": 0.5, "classes": 0.5}


def piece(dynamic=True, shape=(3,)):
    """What is known of a program whose forward takes a tensor and a number."""
    example = (torch.zeros(2, *shape), 4), {}
    return SimpleNamespace(
        state=(),
        answers=(SimpleNamespace(inputs=example),),
        dynamic=dynamic,
        batches=ANY,
        sizes=[{0: "batch"} if dynamic else {}],
        read=lambda inputs: [inputs[0][0]],
        path="",
    )


def test_inputs_become_calls_of_a_few_examples():
    x = torch.arange(60.0).reshape(20, 3)
    feeds = feeds_of((x, 4), piece(), ["x"])
    assert [len(feed["x"]) for feed in feeds] == [4] * 5
    assert np.array_equal(np.concatenate([feed["x"] for feed in feeds]), x.numpy())
    seen, unseen = divided(feeds)
    assert (rows_in(seen, piece()), rows_in(unseen, piece())) == (16, 4)
    given, batch = one_example(piece())
    assert ([array.shape for array in given], batch) == ([(1, 3)], 1)


def test_data_with_targets_give_their_inputs():
    inputs = [[torch.full((8, 3), float(i)), torch.tensor(4)] for i in range(30)]
    train = [(batch, torch.zeros(8, dtype=torch.int64)) for batch in inputs]
    feeds = feeds_of((train, train[:1]), piece(), ["x"])
    assert rows_in(feeds, piece()) == EXAMPLES
    assert feeds[-1]["x"].max() == EXAMPLES // 8 - 1
    assert not is_source((torch.zeros(8, 3), torch.zeros(8, 3)))


def test_a_file_of_one_batch_size_is_given_whole_batches():
    batches = [(torch.zeros(8, 3), 4), (torch.ones(8, 3), 4)]
    feeds = feeds_of(batches, piece(dynamic=False), ["x"])
    assert [feed["x"].shape for feed in feeds] == [(8, 3)] * 2
    given, batch = one_example(piece(dynamic=False))
    assert ([array.shape for array in given], batch) == ([(2, 3)], 2)


def test_inputs_of_which_no_file_can_be_made_are_refused():
    x = torch.randn(20, 3)
    x[7, 1] = float("nan")
    with pytest.raises(UsageError, match=r"hold NaN or infinite numbers \(x\)"):
        feeds_of((x, 4), piece(), ["x"])
    with pytest.raises(UsageError, match="int8 needs several examples"):
        feeds_of((torch.randn(1, 3), 4), piece(), ["x"])
    with pytest.raises(UsageError, match="do not fit the model: it was gated with"):
        feeds_of(torch.randn(20, 3), piece(), ["x"])
    for wrong in (torch.randn(20, 5), torch.ones(20, 3, dtype=torch.uint8)):
        with pytest.raises(UsageError, match=f"{tuple(wrong.shape)[1]}.*of {wrong.dtype}"):
            feeds_of((wrong, 4), piece(), ["x"])
    with pytest.warns(L0pruneWarning, match="calibrated with 8 examples"):
        feeds_of((torch.randn(8, 3), 4), piece(), ["x"])


def test_a_model_in_parts_or_of_an_old_opset_has_no_int8_file():
    parts = [SimpleNamespace(path="a"), SimpleNamespace(path="b")]
    with pytest.raises(UsageError, match="becomes 2 ONNX files"):
        Int8File([], None, parts)
    with pytest.raises(UsageError, match="which opset 12 cannot say: give 13 or more"):
        Int8File([], 12, [piece()])
    Int8File([], None, [piece()])


def test_what_is_not_gained_is_said():
    times = Times((2.0,) * 8, (1.0,) * 8, 1, 1, "onnxruntime 1.0", "a processor")
    good = Int8(MINMAX, 12, 4, {"y": 0.02}, {"y": 1.0}, (), (), times)
    assert good.warnings == []
    assert str(good).startswith("y 2.00% from float32, the same largest score in 100.0% (4 exam")
    assert "(2.50% without)" in str(replace(good, compensated=(0.025, 0.02)))
    assert "without" not in str(replace(good, compensated=(0.025, 0.026)))
    slow = replace(good, times=replace(times, small=(1.99,) * 8))
    assert "not faster than the one in float32: 2 → 1.99 ms" in slow.warnings[0]
    mixed = replace(good, kept=("stem",), times=None, speed=Speed(2.0, 2.5, 1.5))
    assert mixed.warnings == []
    assert "in float32: stem (so 2.5 → 1.5 ms)" in str(mixed)
    single = replace(mixed, speed=Speed(2.0, 2.5, 2.0, is_all=True))
    (text,) = single.warnings
    assert "not faster than the one in float32 (2 ms): with eight bits wherever" in text
    assert "takes 2.5 ms, so that all layers are computed in float32" in text
    assert replace(single, times=times).warnings == [text]
    bad = replace(good, errors={"y": 0.3}, costly=(("stem", 0.2),), has_vnni=False)
    assert "no VNNI instructions" in bad.warnings[0]
    assert "change the outputs by 30%. The layers that cost most: stem (20%)" in bad.warnings[1]


def test_nodes_of_a_file_in_eight_bits_come_after_what_they_read(tmp_path):
    x = numbers(40, 8)
    condition = {"then_branch": ["Relu", "h"], "else_branch": ["Sigmoid", "h"]}
    inner = {
        name: helper.make_graph(
            [helper.make_node(kind, [read], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for name, (kind, read) in condition.items()
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        helper.make_node("ReduceMax", ["h"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "zero"], ["is_large"]),
        helper.make_node("If", ["is_large"], ["chosen"], **inner),
        helper.make_node("Gemm", ["chosen", "v"], ["y"]),
    ]
    weights = {"w": numbers(8, 8), "b": numbers(8), "v": numbers(8, 3), "zero": np.float32(0)}
    made = quantizer_of(file(nodes, weights, (8,)), [{"x": x}], tmp_path).quantized()
    assert "QuantizeLinear" in {node.op_type for node in made.graph.node}
    onnx.checker.check_model(made)


def test_of_many_values_no_ranges_are_searched_by_entropy(tmp_path, monkeypatch):
    monkeypatch.setattr("l0prune.features.int8.quantizer._MANY", 2)
    quantizer = quantizer_of(linear(numbers(5, 6), numbers(5)), [{"x": numbers(8, 6)}], tmp_path)
    assert {*quantizer.ranges} == {*METHODS}
    monkeypatch.setattr("l0prune.features.int8.quantizer._MANY", 1)
    search, _, error = searched(linear(numbers(5, 6), numbers(5)), tmp_path)
    assert error < 0.05
    assert search.method in {*METHODS} - {"entropy"}


def test_a_histogram_that_grew_is_searched_as_fast_as_others():
    from l0prune.features.int8.quantizer import _coarser

    for size in (2048, 2049, 70_001):
        counts, edges = np.arange(size), np.linspace(-3, 3, size + 1)
        coarse, ends, *rest = _coarser((counts, edges, -3.0, 3.0, 3.0))
        assert 256 <= len(coarse) <= 275
        assert len(ends) == len(coarse) + 1
        assert coarse.sum() == counts.sum()
        assert rest == [-3.0, 3.0, 3.0]
