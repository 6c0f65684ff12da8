"""ONNX files as models: what is converted, what is refused, and files that mean harm."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from differences import run_onnx
from onnx import helper, numpy_helper
from onnx_files import INT, draws, node, written
from torch import nn

import l0prune
from l0prune.capture.threads import muted
from l0prune.errors import FileError, L0pruneError, UsageError
from l0prune.features.onnx_in import source as onnx_source
from l0prune.features.unlabelled.forecast import foresee
from l0prune.files.model_sources import load_model


class Net(nn.Module):
    """Convolutions with a BatchNorm and a sum, and a Linear after a flatten of maps."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x):
        x = self.norm(self.first(x).relu())
        return self.head((x + self.second(x).relu()).flatten(1))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model = Net()
    model(torch.randn(64, 3, 4, 4))
    return model.eval()


@pytest.fixture(scope="module")
def exported(net, tmp_path_factory):
    """The file that torch's former exporter makes of it, of batches of one."""
    path = tmp_path_factory.mktemp("exported") / "net.onnx"
    with muted():
        torch.onnx.export(
            net,
            (torch.randn(1, 3, 4, 4),),
            str(path),
            dynamo=False,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            input_names=["image 1"],
            output_names=["scores"],
        )
    return path


def test_weights_keep_their_names_and_the_batch_becomes_free(net, exported):
    found = load_model(str(exported))
    assert found.fixed_batch == 0
    assert found.example_input_array[0].shape == (2, 3, 4, 4)
    own, expected = found.state_dict(), net.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own if "num_batch" not in name)
    x = torch.randn(7, 3, 4, 4)
    assert torch.allclose(found(x), net(x), atol=1e-6)
    assert found.origin.sha256 == hashlib.sha256(exported.read_bytes()).hexdigest()


def test_a_file_is_gated_kept_cut_and_written(exported, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = load_model(str(exported))
    l0prune.gate(model, model.example_input_array)
    with torch.no_grad():
        gates = l0prune.gates(model)
        gates.log_alpha.fill_(5)
        gates.log_alpha[1::3] = -9
    l0prune.save(model, tmp_path / "net.gated.pt")
    again = l0prune.load(tmp_path / "net.gated.pt")
    x = torch.randn(3, 3, 4, 4)
    assert torch.equal(again.eval()(x), model.eval()(x))
    small = l0prune.export(again)
    (file,) = small.save_onnx(tmp_path / "small.onnx")
    assert small.params < small.params_before
    (found,) = run_onnx(file, x)
    assert torch.allclose(found, model(x), atol=1e-5)
    assert torch.allclose(load_model(str(file))(x), model(x), atol=1e-5)
    written_graph = onnx.load(file).graph
    assert [value.name for value in written_graph.input] == ["image 1"]
    assert [value.name for value in written_graph.output] == ["scores"]
    (check,) = (c for c in small.certificate.checks if c.what == "source")
    assert (check.error, check.tolerance) == (again.origin.error, 1e-5)


@pytest.mark.slow
def test_with_all_gates_open_the_file_that_goes_out_is_the_one_that_came_in(exported, tmp_path):
    model = load_model(str(exported))
    l0prune.gate(model, model.example_input_array, open_probability=0.999)
    (file,) = l0prune.export(model, verify="float32").save_onnx(tmp_path / "whole.onnx")
    x = torch.randn(1, 3, 4, 4)
    assert torch.allclose(*run_onnx(file, x), *run_onnx(exported, x), atol=1e-5)


def test_the_file_that_came_in_is_not_written_over(exported):
    model = load_model(str(exported))
    l0prune.gate(model, model.example_input_array)
    with pytest.raises(UsageError, match="is the file that this network was made from"):
        l0prune.export(model, verify="float32").save_onnx(exported)


def test_a_gated_model_asks_before_it_reads_another_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")]
    weights = {"w": draws(4, 6), "v": draws(6, 2)}
    path = written(tmp_path / "net.onnx", nodes, weights)
    model = load_model(path)
    l0prune.gate(model, model.example_input_array)
    l0prune.save(model, tmp_path / "net.gated.pt")
    written(Path(path), nodes, weights | {"v": draws(6, 2, seed=1)})
    with pytest.raises(FileError, match="you have not named this on this machine, or it has chang"):
        l0prune.load(tmp_path / "net.gated.pt")


SIZE = np.array([0, -1, 2])
OPERATORS = {
    "reshape by a shape that is computed": (
        [
            node("Shape", "x", "s"),
            node("Gather", "s first", "n"),
            node("Unsqueeze", "n axis", "m"),
            node("Concat", "m rest", "t", axis=0),
            node("Reshape", "x t", "y"),
        ],
        {"first": np.array(0), "axis": np.array([0]), "rest": np.array([2, 2])},
    ),
    "half of the positions": (
        [
            node("Shape", "x", "s"),
            node("Slice", "s one two", "n"),
            node("Div", "n half", "m"),
            node("Slice", "x zero m one", "y"),
        ],
        {"one": np.array([1]), "two": np.array([2]), "half": np.array([2]), "zero": np.array([0])},
    ),
    "a copy of a row": (
        [
            node("Shape", "x", "s"),
            node("Slice", "s zero one", "n"),
            node("Concat", "n four", "t", axis=0),
            node("Expand", "row t", "e"),
            node("Add", "e x", "y"),
        ],
        {
            "zero": np.array([0]),
            "one": np.array([1]),
            "four": np.array([4]),
            "row": draws(1, 4),
        },
    ),
    "split": (
        [node("Split", "x parts", "a b", axis=1), node("Concat", "b a", "y", axis=1)],
        {"parts": np.array([1, 3])},
    ),
    "slices backwards": (
        [node("Slice", "x last first axis step", "y")],
        {
            n: np.array([v])
            for n, v in zip(("last", "first", "axis", "step"), (-1, 1 - 2**63, 1, -1), strict=True)
        },
    ),
    "reductions": (
        [
            node("ReduceMean", "x axis", "a", keepdims=0),
            node("ReduceL2", "x axis", "b", keepdims=0),
            node("ReduceSumSquare", "x axis", "c", keepdims=0),
            node("ReduceMax", "x axis", "d", keepdims=0),
            node("Sum", "a b c d", "y"),
        ],
        {"axis": np.array([-1])},
    ),
    "comparisons": (
        [
            node("Greater", "x zero", "g"),
            node("Clip", "x - zero", "c"),
            node("Where", "g x c", "w"),
            node("Max", "w low", "y"),
        ],
        {"zero": np.array(0, np.float32), "low": np.array(-0.5, np.float32)},
    ),
    "a product with numbers before it": (
        [node("Gemm", "x w b", "y", alpha=0.5, beta=2.0, transB=0)],
        {"w": draws(4, 3), "b": draws(3)},
    ),
    "a product with its bias": (
        [node("MatMul", "x w", "h"), node("Add", "b h", "y")],
        {"w": draws(4, 3), "b": draws(3)},
    ),
    "what onnx2pytorch converts": (
        [
            node("Unsqueeze", "x axis", "u"),
            node("Resize", "u - - sizes", "r", mode="nearest"),
            node("Pad", "r pads", "p"),
            node("AveragePool", "p", "a", kernel_shape=[2], strides=[2]),
            node("LeakyRelu", "a", "l", alpha=0.3),
            node("TopK", "l k", "y i", axis=2),
        ],
        {
            "axis": np.array([1]),
            "sizes": np.array([1, 1, 8]),
            "pads": np.array([0, 0, 1, 0, 0, 1]),
            "k": np.array([2]),
        },
    ),
    "a padding of one side": (
        [
            node("Reshape", "x s", "m"),
            node("Conv", "m w", "y", kernel_shape=[2, 2], pads=[0, 1, 1, 0]),
        ],
        {"s": np.array([0, 1, 2, 2]), "w": draws(3, 1, 2, 2)},
    ),
    "a padding by the input's size": (
        [
            node("Reshape", "x s", "m"),
            node("Conv", "m w", "y", kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
        ],
        {"s": np.array([0, 1, 2, 2]), "w": draws(3, 1, 2, 2)},
    ),
    "a norm and a scale of its own": (
        [
            node("LayerNormalization", "x g b", "h", epsilon=1e-3),
            node("Mul", "h c", "y"),
        ],
        {"g": draws(4), "b": draws(4), "c": draws(4)},
    ),
    "numbers of a shape that are reduced and divided": (
        [
            node("ReduceL1", "t -", "a", keepdims=1),
            node("ReduceL1", "m -", "b", keepdims=0),
            node("ReduceL2", "t rows", "c", keepdims=1),
            node("ReduceSumSquare", "t rows", "d", keepdims=1),
            node("Div", "d three", "e"),
            node("Add", "a c", "f"),
            node("Add", "f e", "g"),
            node("Add", "g b", "h"),
            node("Cast", "h", "i", to=onnx.TensorProto.FLOAT),
            node("Add", "x i", "y"),
        ],
        {
            "t": np.array([[0, 1, 2, 3], [-4, 5, 6, -7]]),
            "m": np.array([[3, -4]]),
            "rows": np.array([0]),
            "three": np.array([-3]),
        },
    ),
    "constants of nodes": (
        [
            node("Constant", "", "c", value_float=2.5),
            node("Cast", "x", "i", to=INT),
            node("Cast", "i", "f", to=onnx.TensorProto.FLOAT),
            node("Div", "f c", "y"),
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_what_onnx_runtime_does(name, tmp_path):
    nodes, weights = OPERATORS[name]
    path = written(tmp_path / "net.onnx", nodes, weights, sizes=("n", 4))
    model = load_model(path)
    x = torch.randn(1, 4)
    expected, found = run_onnx(path, x)[0], model(x)
    found = found if isinstance(found, torch.Tensor) else found[0]
    assert torch.allclose(found, expected, atol=1e-6)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        exact = model.double()(x.double())
    finally:
        torch.set_default_dtype(default)
    exact = exact if isinstance(exact, torch.Tensor) else exact[0]
    assert exact.dtype == torch.float64
    assert torch.allclose(exact, expected.double())


def test_an_embedding_by_tokens_of_any_length(tmp_path):
    nodes = [node("Gather", "table x", "e"), node("MatMul", "e w", "y")]
    weights = {"table": draws(5, 6), "w": draws(6, 2)}
    path = written(tmp_path / "net.onnx", nodes, weights, ("batch", "words"), kind=INT)
    model = load_model(path)
    assert model.free == {"x": {1: "words"}}
    x = torch.tensor([[1, 4, 0], [2, 2, 3]])
    assert torch.allclose(model(x), run_onnx(path, x)[0], atol=1e-6)


@pytest.mark.parametrize("end", [10**9, 2**31 - 1, 2**63 - 1])
@pytest.mark.one_in(3)
def test_the_end_of_a_slice_of_the_batch_leaves_it_free(end, tmp_path):
    nodes = [
        node("MatMul", "x w", "h"), node("Relu", "h", "r"),
        node("Slice", "r first last axis", "s"), node("MatMul", "s v", "y"),
    ]  # fmt: skip
    weights = {"w": draws(4, 8), "v": draws(8, 2)}
    weights |= {
        n: np.array([v]) for n, v in zip(("first", "last", "axis"), (0, end, 0), strict=True)
    }
    path = written(tmp_path / "net.onnx", nodes, weights, ("batch", 4))
    model = load_model(path)
    l0prune.gate(model, model.example_input_array)
    small = l0prune.export(model)
    assert small.pieces[0].dynamic
    assert "for batches of" not in small.note


def test_a_batch_that_the_graph_needs_stays_as_it_is(tmp_path):
    nodes = [node("Reshape", "x s", "r"), node("MatMul", "r w", "y")]
    path = written(
        tmp_path / "net.onnx", nodes, {"s": np.array([2, -1]), "w": draws(2, 3)}, sizes=(1, 4)
    )
    model = load_model(path)
    assert model.fixed_batch == 1
    with pytest.raises(UsageError, match="is for batches of 1"):
        model(torch.randn(2, 4))


def test_a_sound_is_tried_with_many_samples(tmp_path):
    path = written(tmp_path / "net.onnx", [node("Tanh", "x", "y")], {}, sizes=("batch", "samples"))
    assert load_model(path).example_input_array[0].shape == (2, 16000)


def test_one_channel_in_place_of_three_is_not_repeated(tmp_path):
    nodes = [node("Sub", "x mean", "c"), node("Conv", "c w", "y")]
    weights = {"mean": draws(1, 3, 1, 1), "w": draws(4, 3, 3, 3)}
    path = written(tmp_path / "net.onnx", nodes, weights, sizes=("batch", 3, 8, 8))
    model = load_model(path)
    with pytest.raises(L0pruneError, match="declares 3 for dim 1 of x, and the 1 that was given"):
        l0prune.gate(model, torch.randn(2, 1, 8, 8))
    assert model(torch.randn(2, 3, 12, 8)).shape == (2, 4, 10, 6)


def test_shrink_takes_the_batch_that_the_graph_needs(tmp_path):
    nodes = [node("Reshape", "x s", "r"), node("MatMul", "r u", "h"), node("Relu", "h", "a")]
    nodes += [node("MatMul", "a w", "y")]
    weights = {"s": np.array([2, -1]), "u": draws(2, 16), "w": draws(16, 3)}
    model = load_model(written(tmp_path / "net.onnx", nodes, weights, sizes=(1, 4)))
    assert model.fixed_batch == 1
    assert foresee(model, torch.randn(96, 4), "params=0.7").examples == 96
    small = l0prune.shrink(model, torch.randn(96, 4), "params=0.7", round_to=1, progress=False)
    assert small.params <= 0.7 * small.params_before


def test_a_number_beside_a_batch_that_the_graph_needs(tmp_path):
    nodes = [node("Reshape", "x s", "r"), node("Mul", "r level", "m"), node("MatMul", "m w", "y")]
    weights = {"s": np.array([2, -1]), "w": draws(2, 3)}
    path = written(tmp_path / "net.onnx", nodes, weights, sizes=(1, 4), more={"level": ()})
    model, x, level = load_model(path), torch.randn(1, 4), torch.tensor(3.0)
    assert model.fixed_batch == 1
    wanted = 3 * x.reshape(2, 2) @ torch.from_numpy(weights["w"])
    assert torch.allclose(model(x, level), wanted, atol=1e-6)
    with pytest.raises(UsageError, match="is for batches of 1"):
        model(torch.randn(2, 4), level)


def _if():
    inner = helper.make_graph(
        [node("Relu", "x", "r")], "inner", [], [helper.make_empty_tensor_value_info("r")]
    )
    return [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Cast", "s", "c", to=onnx.TensorProto.BOOL),
        node("If", "c", "y", then_branch=inner, else_branch=inner),
    ]


REFUSED = {
    "its own domain": ([node("Fancy", "x", "y", domain="made.up")], "Fancy .* of the domain made"),
    "control flow": (_if(), r"If \(y\): control flow"),
    "quantized": (
        [node("QuantizeLinear", "x scale", "q"), node("DequantizeLinear", "q scale", "y")],
        "is quantized: it has the operator QuantizeLinear .*Prune first",
    ),
    "none of ONNX": (
        [node("Unheard", "x", "y")],
        "Unheard .y., which ONNX does not have in opset 18",
    ),
    "an input that nothing makes": ([node("Add", "x z", "y")], "no valid ONNX file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_named(name, tmp_path):
    nodes, said = REFUSED[name]
    weights = {"scale": np.array(0.1, np.float32)}
    path = written(tmp_path / "net.onnx", nodes, weights)
    with pytest.raises(FileError, match=said.replace(" .*", r"[\s\S]*")):
        load_model(path)


def test_an_old_opset_is_named(tmp_path):
    path = written(tmp_path / "net.onnx", [node("Relu", "x", "y")], opset=6)
    with pytest.raises(FileError, match="is of opset 6; l0prune reads 7 and later"):
        load_model(path)


@pytest.mark.parametrize(
    ("location", "said"),
    [("../secret", "outside its own folder"), ("/etc/passwd", "outside its own"), ("w", "beside")],
)
def test_weights_beyond_the_folder_are_not_read(location, said, tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(96))
    path = written(folder / "net.onnx", [node("MatMul", "x w", "y")], {"w": draws(4, 6)})
    model = onnx.load(path)
    (weight,) = model.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    Path(path).write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match=said):
        load_model(path)


def test_weights_beside_the_file_are_read(tmp_path):
    w = draws(4, 6)
    path = written(tmp_path / "net.onnx", [node("MatMul", "x w", "y")], {"w": w})
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    assert np.array_equal(next(load_model(path).parameters()).detach().T, w)
    with open(tmp_path / "w.data", "r+b") as file:
        file.truncate(40)
    with pytest.raises(FileError, match=r"is not all in w\.data"):
        load_model(path)


@pytest.mark.parametrize("content", [b"", b"no ONNX at all", bytes(range(256))])
def test_a_damaged_file_is_one(content, tmp_path):
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(FileError, match="is damaged, or no ONNX file"):
        load_model(str(tmp_path / "net.onnx"))


def test_a_graph_that_would_fill_the_memory_is_refused(tmp_path):
    nodes = [node("Expand", "one s", "e"), node("ReduceSum", "e", "t"), node("Add", "x t", "y")]
    weights = {"one": draws(1, 2), "s": np.array([10**6, 10**6, 2])}
    path = written(tmp_path / "net.onnx", nodes, weights)
    with pytest.raises(FileError, match="too large to be meant"):
        load_model(path)


def test_the_comparison_is_of_an_input_that_matters(tmp_path):
    nodes = [node("Gemm", "x w b", "h"), node("Softmax", "h", "y", axis=1)]
    weights = {"w": draws(40, 3), "b": np.array([30, 0, 0], np.float32)}
    model = load_model(written(tmp_path / "net.onnx", nodes, weights, ("batch", 40)))
    (x,) = model.example_input_array
    assert x.std() > 5  # at a deviation of 1 all is on the first class
    assert (model(x)[0] - model(x)[1]).abs().max() > 1e-3


@pytest.fixture(scope="module")
def steep(tmp_path_factory):
    """A file whose layers amplify rounding, and the rounding of its network as it is measured: by
    enough that one and a half times as much has to be measured, and ten times as much is no more
    than may be allowed."""
    path = tmp_path_factory.mktemp("steep") / "net.onnx"
    names, nodes = ["x", *(f"y{n}" for n in range(9)), "y"], []
    for n, (before, after) in enumerate(pairwise(names)):
        nodes += [node("MatMul", f"{before} w{n}", f"h{n}"), node("Sin", f"h{n}", after)]
    for gain in np.arange(1.75, 2, 0.01):
        drawn = np.random.default_rng(0).normal(size=(10, 6, 6))
        weights = {f"w{n}": np.float32(gain * np.linalg.qr(w)[0]) for n, w in enumerate(drawn)}
        network = load_model(written(path, nodes, weights, ("batch", 6)))
        with torch.no_grad():
            run = onnx_source._Run(network.example_input_array, [])
            exact = onnx_source._exact(network, run.example)
            own = onnx_source._difference(exact, [network(*run.example)])
            rounding = onnx_source._rounding(network, run, exact)
        if max(1e-5, 2 * own) < 1.3 * rounding and 10 * rounding < 1e-4:
            return str(path), rounding
    raise AssertionError("none of these networks rounds by so much")


def faulty(monkeypatch, fault):
    """ONNX Runtime gives outputs that are off by this much of their scale."""
    right = onnx_source._run

    def run(*args):
        return [each + fault * each.abs().max() for each in right(*args)]

    monkeypatch.setattr(onnx_source, "_run", run)


def test_a_file_may_differ_by_what_float32_rounds(steep, monkeypatch):
    path, rounding = steep
    faulty(monkeypatch, 1.5 * rounding)
    monkeypatch.setattr(onnx_source, "_rounding", lambda *args: rounding)  # by one example
    origin = load_model(path).origin
    assert origin.error == pytest.approx(1.5 * rounding, rel=0.2)
    assert origin.tolerance == 2 * rounding


def test_a_file_that_differs_by_ten_times_as_much_is_refused(steep, monkeypatch):
    path, rounding = steep
    faulty(monkeypatch, 10 * rounding)
    with pytest.raises(FileError, match="An operator of the file means something else"):
        load_model(path)


def test_a_file_that_rounds_by_more_than_can_be_compared_is_not_called_wrong(steep, monkeypatch):
    path, _ = steep
    faulty(monkeypatch, 2e-4)
    monkeypatch.setattr(onnx_source, "_rounding", lambda *_: 1.5e-4)
    with pytest.raises(FileError, match=r"So does rounding in float32, by 1\.5e-04") as raised:
        load_model(path)
    assert "means something else" not in str(raised.value)


def weights_in(path):
    """Number of floats that a file stores."""
    stored = (each for each in onnx.load(path).graph.initializer if each.data_type == 1)
    return sum(int(np.prod(each.dims)) for each in stored)


def cut_and_written(path, folder, share=0.6):
    """Close slots at random, write the file, and compare it with the gated model."""
    torch.manual_seed(0)
    model = load_model(path)
    l0prune.gate(model, model.example_input_array, dynamic_shapes=model.free)
    gates = l0prune.gates(model)
    gates.set_open(torch.rand(gates.plan.size) < share)
    small = l0prune.export(model.eval())
    (file,) = small.save_onnx(folder / "small.onnx")
    x = model.example_input_array[0]
    assert torch.allclose(run_onnx(file, x)[0], model(x), atol=1e-5)
    return small, file


SHARED = {
    "a table and its transpose": (
        [
            node("Gather", "t x", "e"),
            node("MatMul", "e a", "h"),
            node("Relu", "h", "r"),
            node("MatMul", "r b", "z"),
            node("Transpose", "t", "u", perm=[1, 0]),
            node("MatMul", "z u", "y"),
        ],
        {"t": draws(30, 8), "a": draws(8, 12), "b": draws(12, 8)},
        ("batch", 3), INT,
    ),
    "an encoder and its transpose": (
        [
            node("Gemm", "x w c", "h", transB=1),
            node("Relu", "h", "r"),
            node("MatMul", "r w", "y"),
        ],
        {"w": draws(20, 9), "c": draws(20)},
        ("batch", 9), onnx.TensorProto.FLOAT,
    ),
    "a decoder by an explicit transpose": (
        [
            node("MatMul", "x w", "h"),
            node("Relu", "h", "r"),
            node("Transpose", "w", "v", perm=[1, 0]),
            node("MatMul", "r v", "y"),
        ],
        {"w": draws(9, 20)},
        ("batch", 9), onnx.TensorProto.FLOAT,
    ),
    "one matrix with two biases": (
        [
            node("MatMul", "x v", "g"),
            *(each for n in "ab" for each in (
                node("MatMul", "g w", f"h{n}"), node("Add", f"h{n} {n}", f"z{n}"),
            )),
            node("Mul", "za zb", "y"),
        ],
        {"v": draws(9, 14), "w": draws(14, 20), "a": draws(20), "b": draws(20, seed=1)},
        ("batch", 9), onnx.TensorProto.FLOAT,
    ),
    "a convolution and its transpose": (
        [
            node("Conv", "x w", "h", strides=[2], kernel_shape=[2]),
            node("Relu", "h", "r"),
            node("ConvTranspose", "r w", "y", strides=[2], kernel_shape=[2]),
        ],
        {"w": draws(24, 3, 2)},
        ("batch", 3, 8), onnx.TensorProto.FLOAT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.one_in(3)
def test_a_weight_of_several_readers_stays_one_parameter(name, tmp_path):
    nodes, weights, sizes, kind = SHARED[name]
    path = written(tmp_path / "net.onnx", nodes, weights, sizes, kind=kind)
    small, file = cut_and_written(path, tmp_path)
    assert small.params_before == weights_in(path)
    assert small.params == weights_in(file) < weights_in(path)


def _branch(name, weight, other):
    """A branch whose values have the names of those of other branches."""
    inner = [node("MatMul", "h A", "m"), node("Relu", "m", "r"), node("MatMul", "r B", "o")]
    arrays = [numpy_helper.from_array(each, n) for each, n in ((weight, "A"), (other, "B"))]
    return helper.make_graph(inner, name, [], [helper.make_empty_tensor_value_info("o")], arrays)


def _choice(condition, result, seed):
    branches = (_branch(n, draws(8, 10, seed=seed + k), draws(10, 8, seed=seed + k + 1))
                for k, n in enumerate(("t", "e")))  # fmt: skip
    then, other = branches
    return node("If", condition, result, then_branch=then, else_branch=other)


CONDITIONS = {
    "numbers": [node("Equal", "two two", "c")],
    "a rank": [node("Shape", "h", "s"), node("Size", "s", "n"), node("Equal", "n two", "c")],
    "a size": [
        node("Shape", "h", "s"),
        node("Gather", "s one", "n"),
        node("Equal", "n one", "k"),
        node("Not", "k", "c"),
    ],
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_branches_of_a_condition_that_is_always_the_same_are_folded(name, tmp_path):
    nodes = [
        node("MatMul", "x w", "h"),
        *CONDITIONS[name],
        _choice("c", "i", 0),
        node("Relu", "i", "j"),
        _choice("c", "k2", 5),  # its branches name their values like those of the first
        node("Add", "j k2", "y"),
    ]
    weights = {"w": draws(4, 8), "one": np.array(1), "two": np.array(2)}
    path = written(tmp_path / "net.onnx", nodes, weights)
    small, _ = cut_and_written(path, tmp_path)
    assert sum(axis.size == 10 for axis in small.plan.axes) == 2
    assert small.params_before == 32 + 2 * 160  # of each pair of branches one is gone


def test_a_condition_on_a_free_size_is_refused(tmp_path):
    nodes = [
        node("MatMul", "x w", "h"),
        node("Shape", "h", "s"),
        node("Gather", "s zero", "n"),
        node("Equal", "n one", "c"),
        _choice("c", "y", 0),
    ]
    weights = {"w": draws(4, 8), "zero": np.array(0), "one": np.array(1)}
    path = written(tmp_path / "net.onnx", nodes, weights)
    with pytest.raises(FileError, match=r"If \(y\): control flow"):
        load_model(path)


@pytest.mark.slow
def test_weights_of_an_lstm_that_are_computed_are_folded(tmp_path):
    hidden, width = 24, 12  # more elements than onnxscript folds by itself
    weights = {
        "w1": draws(1, 2 * hidden, width), "w2": draws(1, 2 * hidden, width, seed=1),
        "R": draws(1, 4 * hidden, hidden) / 4,
        "b1": draws(1, 4 * hidden), "b2": draws(1, 4 * hidden),
        "zero": np.zeros((1, 1, hidden), np.float32), "hidden": np.array([hidden]),
        "axis": np.array([1]), "one": np.array([1]), "half": np.array(0.5, np.float32),
    }  # fmt: skip
    nodes = [
        node("Mul", "w1 half", "v1"),
        node("Concat", "v1 w2", "W", axis=1),
        node("Concat", "b1 b2", "B", axis=1),
        node("Shape", "x", "s"),
        node("Slice", "s one two", "n"),
        node("Concat", "one n hidden", "t", axis=0),
        node("Expand", "zero t", "z"),  # a state of zeros for a batch of any size
        node("LSTM", "x W R B - z z", "l", hidden_size=hidden),
        node("Squeeze", "l axis", "q"),
        node("MatMul", "q o", "y"),
    ]
    weights |= {"o": draws(hidden, 3), "two": np.array([2])}
    path = written(tmp_path / "net.onnx", nodes, weights, ("time", "batch", width))
    small, _ = cut_and_written(path, tmp_path)
    assert [axis.size for axis in small.plan.axes if axis.size == hidden]
    assert small.params < small.params_before == 4 * hidden * (width + hidden + 2) + 3 * hidden
