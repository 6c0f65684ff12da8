"""ONNX files of older opsets, compared like all others."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
import torch.nn.functional as F
from differences import run_onnx
from networks import Fn
from round_trips import metadata
from torch import nn

import l0prune
from l0prune.errors import L0pruneError, UsageError


def exported(net, x, **options):
    l0prune.gate(net.eval(), x, **options)
    with torch.no_grad():
        l0prune.gates(net).log_alpha[::2] = -9
    return net, l0prune.export(net)


def convolutional():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 3 * 3, 5)), torch.randn(2, 3, 8, 8)


def opset_of(file):
    return [entry.version for entry in onnx.load(file).opset_import if not entry.domain]


@pytest.mark.parametrize("opset", [9, 13, 17, 18])
@pytest.mark.one_in(4)
def test_a_file_of_an_older_opset_is_the_same_model(opset, tmp_path):
    model, dense = exported(*convolutional())
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=opset)
    assert opset_of(file) == [opset]
    proto = onnx.load(file)
    onnx.checker.check_model(proto)
    (given,), (got,) = proto.graph.input, proto.graph.output
    assert given.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert (given.name, got.name) == ("input", "output")
    checks = json.loads(metadata(file)["l0prune.certificate"])
    assert {check["batch"] for check in checks if check["what"] == "onnx"} == {1, 2, 3}
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(run_onnx(file, x)[0], model(x), rtol=1e-4, atol=1e-5)


def attention(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return {"logits": m.out(result.view(x.shape[0], x.shape[1], -1)), "length": x.shape[1]}


def attending():
    return Fn(attention, qkv=nn.Linear(6, 24), out=nn.Linear(8, 3)), torch.randn(2, 5, 6)


def test_the_lowest_opset_that_has_an_operator_is_said_with_its_name(tmp_path, capfd):
    model, dense = exported(*attending())
    capfd.readouterr()
    with pytest.raises(L0pruneError) as raised:
        dense.save_onnx(tmp_path / "m.onnx", opset=12, progress=False)
    assert "scaled_dot_product_attention of this model cannot be written in opset 12" in str(
        raised.value
    )
    assert "(--opset 14)" in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=14)
    x = torch.randn(3, 5, 6)
    found = dict(zip(("logits",), run_onnx(file, x), strict=True))
    torch.testing.assert_close(found["logits"], model(x)["logits"], rtol=1e-4, atol=1e-5)
    assert [output.name for output in onnx.load(file).graph.output] == ["logits"]


def test_a_free_length_is_free_in_an_older_opset(tmp_path):
    net = Fn(lambda m, x: m.b(torch.relu(m.a(x)).reshape(x.shape[0], x.shape[1], -1)))
    net.a, net.b = nn.Linear(6, 8), nn.Linear(8, 2)
    shapes = {"args": ({1: "length"},)}
    model, dense = exported(net, torch.randn(2, 5, 6), dynamic_shapes=shapes)
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=11)
    x = torch.randn(3, 7, 6)
    torch.testing.assert_close(run_onnx(file, x)[0], model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [0, 6, 99, "13", True])
@pytest.mark.one_in(2)
def test_an_opset_that_there_is_not_is_refused(opset, tmp_path):
    _, dense = exported(*convolutional())
    with pytest.raises(UsageError, match="give a number from 7 to "):
        dense.save_onnx(tmp_path / "m.onnx", opset=opset)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.one_in(3)
def test_a_recurrent_layer_is_one_operator_in_an_older_opset(kind, tmp_path):
    net = Fn(lambda m, x: m.out(m.layer(x)[0]))
    net.layer, net.out = kind(4, 6, batch_first=True), nn.Linear(6, 3)
    model, dense = exported(net, torch.randn(2, 5, 4))
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=14)
    assert kind.__name__ in {node.op_type for node in onnx.load(file).graph.node}
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(run_onnx(file, x)[0], model(x), rtol=1e-4, atol=1e-5)


def test_inputs_that_nothing_reads_stay_in_an_older_opset(tmp_path):
    """As a mask, or the cache of an attention that is gone."""
    net = Fn(lambda m, x, mask, rest: m.b(torch.relu(m.a(x))) + rest, a=nn.Linear(6, 8))
    net.b = nn.Linear(8, 2)
    example = torch.randn(2, 6), torch.ones(2, 4, dtype=torch.int64), torch.randn(2, 2)
    model, dense = exported(net, example)
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=13)
    given = {each.name: each.type.tensor_type for each in onnx.load(file).graph.input}
    assert len(given) == 3
    sizes = [
        [size.dim_param or size.dim_value for size in each.shape.dim] for each in given.values()
    ]
    assert sizes == [["batch", 6], ["batch", 4], ["batch", 2]]
    inputs = torch.randn(5, 6), torch.ones(5, 4, dtype=torch.int64), torch.randn(5, 2)
    torch.testing.assert_close(run_onnx(file, *inputs)[0], model(*inputs), rtol=1e-4, atol=1e-5)


def test_what_a_transform_was_written_out_as_is_written_in_an_older_opset(tmp_path):
    net = Fn(lambda m, x: m.b(torch.relu(torch.vmap(lambda row: torch.tanh(m.a(row)))(x))))
    net.a, net.b = nn.Linear(6, 8), nn.Linear(8, 2)
    model, dense = exported(net, torch.randn(2, 6))
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=13)
    x = torch.randn(5, 6)
    torch.testing.assert_close(run_onnx(file, x)[0], model(x), rtol=1e-4, atol=1e-5)


def test_a_table_that_is_cut_to_a_free_length_is_in_an_older_opset(tmp_path):
    net = Fn(lambda m, x: m.b(torch.relu(m.a(x) + m.table[: x.shape[1]])))
    net.a, net.b = nn.Linear(6, 8), nn.Linear(8, 2)
    net.register_buffer("table", torch.randn(16, 8))
    shapes = {"args": ({1: "length"},)}
    model, dense = exported(net, torch.randn(2, 5, 6), dynamic_shapes=shapes)
    (file,) = dense.save_onnx(tmp_path / "m.onnx", opset=13)
    for length in (1, 9, 16):
        x = torch.randn(3, length, 6)
        torch.testing.assert_close(run_onnx(file, x)[0], model(x), rtol=1e-4, atol=1e-5)
