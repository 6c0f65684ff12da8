"""Files in float16 and bfloat16: valid, of these numbers, and as far off as is said."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from commands import in_process
from differences import run_onnx
from onnx.reference import ReferenceEvaluator
from round_trips import metadata
from timed_network import gated

import l0prune
from l0prune.errors import UsageError
from l0prune.exporting.onnx.differences import relative_error
from l0prune.features.half import file as half
from l0prune.features.half.file import in_half, rounded
from l0prune.files.onnx_session import session_of

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
KINDS = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
HELP = onnx.helper


def weights(scale=1.0):
    torch.manual_seed(0)
    return [torch.randn(6, 5) * scale, torch.randn(5), torch.randn(5, 4)]


def network(first, bias, second):
    """Two matrices with a ReLU between, of which the second is in a branch of an If."""
    value = HELP.make_tensor_value_info
    tensors = [
        onnx.numpy_helper.from_array(tensor.numpy(), name)
        for name, tensor in (("first", first), ("bias", bias), ("second", second))
    ]
    branches = {}
    for name, operands in (("then", ("r", "second")), ("else", ("r", "second"))):
        nodes = [HELP.make_node("MatMul", operands, [f"y_{name}"])]
        out = [value(f"y_{name}", onnx.TensorProto.FLOAT, ["n", 4])]
        branches[f"{name}_branch"] = HELP.make_graph(nodes, name, [], out)
    nodes = [
        HELP.make_node("MatMul", ["x", "first"], ["p"]),
        HELP.make_node("Add", ["p", "bias"], ["q"]),
        HELP.make_node("Relu", ["q"], ["r"]),
        HELP.make_node("If", ["flag"], ["y"], **branches),
    ]
    given = [value("x", onnx.TensorProto.FLOAT, ["n", 6]), value("flag", onnx.TensorProto.BOOL, [])]
    out = [value("y", onnx.TensorProto.FLOAT, ["n", 4])]
    graph = HELP.make_graph(nodes, "g", given, out, tensors)
    return HELP.make_model(graph, opset_imports=[HELP.make_opsetid("", 22)], ir_version=10)


def inputs():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    return {"x": x.numpy(), "flag": np.array(True)}


def ran(model, feed=None):
    return session_of(model.SerializeToString(), optimizes=False).run(None, feed or inputs())[0]


@pytest.mark.parametrize("dtype", TORCH)
def test_each_result_is_rounded_as_torch_rounds_it(dtype):
    first, bias, second = weights()

    def as_half(tensor):
        return tensor.to(TORCH[dtype]).float()

    x = as_half(torch.from_numpy(inputs()["x"]))
    q = as_half(as_half(x @ as_half(first)) + as_half(bias))
    expected = as_half(q.relu() @ as_half(second))
    found = ran(rounded(network(first, bias, second), dtype), {**inputs(), "x": x.numpy()})
    step = torch.finfo(TORCH[dtype]).eps  # sums may be in another order before they are rounded
    assert np.allclose(found, expected, rtol=step, atol=step * float(expected.abs().max()))
    assert np.mean(found == expected.numpy()) > 0.7
    exact = ran(network(first, bias, second))
    assert relative_error([(expected.numpy(), found)]) < 0.5 * relative_error([(exact, found)])


@pytest.mark.parametrize("half_io", [False, True])
@pytest.mark.parametrize("dtype", TORCH)
def test_weights_and_operators_are_in_it(dtype, half_io):
    single = network(*weights())
    before = single.SerializeToString()
    made, too_large = in_half(single, dtype, half_io=half_io)
    assert single.SerializeToString() == before
    assert too_large == []
    onnx.checker.check_model(made, full_check=True)
    assert {tensor.data_type for tensor in made.graph.initializer} == {KINDS[dtype]}
    outside = KINDS[dtype] if half_io else onnx.TensorProto.FLOAT
    for value in (made.graph.input[0], made.graph.output[0]):
        assert value.type.tensor_type.elem_type == outside
    casts = [node.op_type for node in made.graph.node].count("Cast")
    assert casts == (0 if half_io else 2)
    feed = inputs()
    if half_io:
        feed["x"] = feed["x"].astype(half._NUMPY[dtype])
    found = ReferenceEvaluator(made).run(None, feed)[0].astype(np.float32)
    expected = ran(single)
    assert 0 < relative_error([(expected, found)]) < 4 * torch.finfo(TORCH[dtype]).eps
    if dtype == "float16":
        session = onnxruntime.InferenceSession(made.SerializeToString())
        assert relative_error([(found, session.run(None, feed)[0].astype(np.float32))]) < 2e-3


def test_what_16_bits_cannot_hold_is_said():
    first, *others = weights()
    first[0, 0], first[1, 1] = 1e5, 1e-12
    _, too_large = in_half(network(first, *others), "float16")
    assert too_large == ["first"]
    wide, _ = in_half(network(first, *others), "bfloat16")
    (kept,) = (t for t in wide.graph.initializer if t.name == "first")
    small = onnx.numpy_helper.to_array(kept).astype(np.float32)
    assert np.isclose(small[1, 1], 1e-12, rtol=0.01)  # and not what a float16 made of it
    assert _half(errors={"y": 0.3}, too_large=("first",)).warnings == [
        "these weights are larger than float16 can hold, and were cut to 65,504: first. Take "
        "bfloat16",
        "float16 changes the outputs by 30%. The usual causes are values that 16 bits cannot hold "
        "and differences of large sums: serve float32, or bfloat16, which has float32's range",
    ]
    assert _half(errors={"y": float("inf")}).warnings
    assert not _half(errors={"y": 0.01, "index": None}).warnings


def _half(errors, too_large=()):
    return half.Half("float16", errors, {}, 3, too_large, (1, 2), None)


def test_what_is_no_such_dtype_is_refused():
    with pytest.raises(UsageError, match=r"'float8'.*float16 or bfloat16"):
        half.HalfFile("float8", None, [])
    with pytest.raises(UsageError, match="opset 18 has no convolutions in bfloat16: give 22"):
        half.HalfFile("bfloat16", 18, [_Whole])
    with pytest.raises(UsageError, match="becomes 2 ONNX files"):
        half.HalfFile("float16", None, [_Whole, _Whole])
    assert half.HalfFile("float16", 18, [_Whole]).opset == 18
    assert half.HalfFile("bfloat16", None, [_Whole]).opset == 22


class _Whole:
    path, state = "", ()


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", TORCH)
def test_such_a_file_lies_beside_the_one_that_is_proven(dtype, apart, tmp_path, timed):
    dense = l0prune.export(gated(), verify="float32")
    plain, small = tmp_path / "model.onnx", tmp_path / f"model.{dtype}.onnx"
    written = dense.save_onnx(plain, dtype=dtype, external_data=apart)
    assert written[:2] == (plain, small)
    assert len(written) == (4 if apart else 2)
    assert all(file.exists() for file in written)
    assert dense.certificate.worst(("onnx",), "float32") < 1e-5
    recorded = json.loads(metadata(small)[f"l0prune.{dtype}"])
    assert recorded == json.loads(json.dumps(dense.half.to_dict()))
    assert "l0prune.float32.certificate" in metadata(small)
    assert "l0prune.certificate" not in metadata(small)
    assert (dense.half.times is None) == (dtype == "bfloat16") == (not dense.half.is_run)
    assert (dense.half.beside_dense is None) == (dtype == "bfloat16")
    assert 0 < recorded["errors"]["output"] < 0.05
    assert 0.4 < recorded["bytes"][0] / recorded["bytes"][1] < 0.8
    x = torch.randn(4, 3, 12, 12)
    expected = run_onnx(plain, x)[0].numpy()
    if dtype == "float16":
        found = run_onnx(small, x)[0].numpy()
        assert relative_error([(expected, found)]) < 3 * recorded["errors"]["output"]
    content = dense.report().content
    assert f"In {dtype}: output" in content.notes
    proven = sum(file.stat().st_size for file in written if "float16" not in file.name)
    assert content.gain.bytes.after == proven


@pytest.mark.slow
def test_the_command_line_writes_and_compares(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    l0prune.save(gated(), "net.gated.pt")
    export = ("export", "net.gated.pt", "--no-time", "--no-report", "--trust-pickle", "--json")
    code, out, text = in_process(capfd, *export, "--dtype", "float16", "--half-io")
    assert code == 0, text
    assert json.loads(out)["files"] == ["net.onnx", "net.float16.onnx"]
    assert json.loads(out)["half"]["dtype"] == "float16"
    given = onnx.load("net.float16.onnx").graph.input[0]
    assert given.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    code, _, text = in_process(capfd, "export", "net.gated.pt", "--trust-pickle", "--half-io")
    assert code == 2
    assert "--dtype" in text


def test_a_dtype_of_torch_is_one_and_flags_without_their_file_are_refused(tmp_path):
    small = l0prune.export(gated())
    small.save_onnx(tmp_path / "model.onnx", dtype=torch.float16)
    assert small.half.dtype == "float16"
    with pytest.raises(UsageError, match="half_io= is about the file that dtype= asks for"):
        small.save_onnx(tmp_path / "other.onnx", half_io=True)
    with pytest.raises(UsageError, match="int8 takes inputs to calibrate with"):
        small.save_onnx(tmp_path / "other.onnx", int8=True)
    assert not (tmp_path / "other.onnx").exists()
