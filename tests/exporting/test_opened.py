"""ONNX files as modules: several outputs by name, and inputs that they do not take."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import l0prune
from l0prune.errors import DataError, FileError
from l0prune.exporting.opened import opened


def written(path, batch):
    """A file of x (batch, 2) and ids (batch,) with outputs logits = 2x and ids_out = ids."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["logits"]),
        helper.make_node("Identity", ["ids"], ["ids_out"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 2]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, [batch]),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 2]),
        helper.make_tensor_value_info("ids_out", TensorProto.INT64, [batch]),
    ]
    graph = helper.make_graph(nodes, "two", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return str(path)


def test_outputs_have_names_and_numbers(tmp_path):
    file = opened(written(tmp_path / "two.onnx", "batch"))
    x, ids = torch.randn(6, 2), torch.arange(6)
    for found in (file(x, ids), file(ids=ids, x=x.double(), more=x), file(x, ids=ids.int())):
        assert list(found) == ["logits", "ids_out"]
        assert torch.equal(found["logits"], 2 * x)
        assert found.logits is found[0]
        assert torch.equal(found[1], ids)
    labels = (x[:, 1] > x[:, 0]).long()
    labels[0] = 1 - labels[0]
    found = l0prune.evaluate(file, ([], [({"x": x, "ids": ids}, labels)]), device="cpu")
    assert found["error"] == pytest.approx(1 / 6)
    loss = torch.nn.functional.cross_entropy(2 * x, labels).item()
    assert found["test_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.ones(3, 3), torch.ones(3).long()], r"takes x of shape \(3, 2\) in float32; .*3, 3"),
        ([torch.ones(4, 2), torch.ones(4).long()], r"batches of 3: --batch-size 3"),
        ([torch.ones(3, 2), torch.ones(3)], r"takes ids .* in int64; .* in float32"),
        ([torch.ones(3, 2)], "takes x, ids; the data gives inputs by place"),
        ([torch.ones(3, 2)] * 3, "takes x, ids"),
    ],
)
def test_inputs_that_it_does_not_take(tmp_path, inputs, message):
    file = opened(written(tmp_path / "two.onnx", 3))
    with pytest.raises(DataError, match=message):
        file(*inputs)


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "a.onnx").write_bytes(np.arange(40).tobytes())
    with pytest.raises(FileError, match="ONNX Runtime cannot open"):
        opened(str(tmp_path / "a.onnx"))
    torch.save({}, tmp_path / "a.pt2")
    with pytest.raises(FileError, match="--trust-pickle"):
        opened(str(tmp_path / "a.pt2"))
    with pytest.raises(FileError, match="is damaged"):
        opened(str(tmp_path / "a.pt2"), trust_pickle=True)


def test_a_damaged_file_is_one_sentence(tmp_path, caplog):
    file = tmp_path / "two.onnx"
    model = onnx.load(written(file, 3))
    helper.set_model_props(model, {"l0prune.key": "valuevalue"})
    onnx.save(model, file)
    file.write_bytes(file.read_bytes().replace(b"valuevalue", b"\xff" * 10))
    with pytest.raises(FileError, match="ONNX Runtime cannot open"):
        opened(str(file))
    (tmp_path / "a.pt2").write_bytes(b"no archive")
    with pytest.raises(FileError, match="is damaged"):
        opened(str(tmp_path / "a.pt2"), trust_pickle=True)
    assert not caplog.text
