"""Files, programs and numbers of an export are of the module as it is, not as it was."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from differences import learned_on, run_onnx
from networks import Fn
from round_trips import metadata
from safetensors.torch import load_file
from torch import nn

import l0prune
from l0prune.errors import CertificateError, UsageError


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)).eval()


def exported(model, x):
    l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return l0prune.export(model)


def certificate_of(file):
    return json.loads(metadata(file)["l0prune.certificate"])


@pytest.mark.slow
def test_each_file_holds_what_the_module_has_learned_since(tmp_path):
    x = torch.randn(4, 6)
    dense = exported(build(), x)
    dense.program  # noqa: B018  # which is of what was, from here on
    optimizer = torch.optim.SGD(dense.module.train().parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        dense.module(x).square().mean().backward()
        optimizer.step()
    now = dense.module.eval()(x).detach()
    for name in ("m.pt", "m.safetensors"):
        (file,) = dense.save(tmp_path / name)
        assert torch.equal(l0prune.resize(build(), file)(x), now)
    dense.save_pretrained(tmp_path / "folder")
    assert torch.equal(l0prune.resize(build(), tmp_path / "folder")(x), now)
    (program,) = dense.save(tmp_path / "m.pt2")
    torch.testing.assert_close(torch.export.load(program).module()(x), now)
    (file,) = dense.save_onnx(tmp_path / "m.onnx")
    torch.testing.assert_close(run_onnx(file, x)[0], now, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_file_has_comparisons_of_its_own_weights_alone(tmp_path):
    dense = exported(build(), torch.randn(4, 6))
    (file,) = dense.save_onnx(tmp_path / "m.onnx")
    assert {check["against"] for check in certificate_of(file)} == {"gated"}
    assert "l0prune.changed" not in metadata(file)
    assert not dense.changed
    learned_on(dense)
    (file,) = dense.save_onnx(tmp_path / "m.onnx")
    assert {(check["what"], check["against"]) for check in certificate_of(file)} == {
        ("onnx", "module")
    }
    assert metadata(file)["l0prune.changed"] in dense.note
    assert dense.to_dict()["changed"]
    dense.save_pretrained(tmp_path / "folder")
    manifest = json.loads((tmp_path / "folder" / "l0prune.json").read_text())
    assert {check["against"] for check in manifest["certificate"]} == {"module"}
    assert manifest["changed"] == metadata(file)["l0prune.changed"]
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    assert torch.equal(weights["0.weight"], dense.module[0].weight)


@pytest.mark.slow
def test_a_setting_that_is_changed_is_in_the_file(tmp_path):
    net = Fn(lambda m, x: m.b(torch.relu(m.a(x)) * m.factor), a=nn.Linear(6, 8), b=nn.Linear(8, 2))
    net.factor = 1.0
    x = torch.randn(2, 6)
    dense = exported(net.eval(), x)
    dense.module.factor = -2.0
    (file,) = dense.save_onnx(tmp_path / "m.onnx")
    torch.testing.assert_close(run_onnx(file, x)[0], dense.module(x), rtol=1e-4, atol=1e-5)
    assert dense.changed


@pytest.mark.slow
def test_a_graph_is_written_as_it_is_too(tmp_path):
    net = Fn(lambda m, x: m.b(torch.relu(m.a(x)).view(-1, 8)), a=nn.Linear(6, 8), b=nn.Linear(8, 2))
    x = torch.randn(2, 6)
    l0prune.gate(net.eval(), x)
    with torch.no_grad():
        l0prune.gates(net).log_alpha[:3] = -9
    dense = learned_on(l0prune.export(net))
    (file,) = dense.save_onnx(tmp_path / "m.onnx")
    torch.testing.assert_close(run_onnx(file, x)[0], dense.module(x), rtol=1e-4, atol=1e-5)
    (file,) = dense.save(tmp_path / "m.pt")
    state = torch.load(file)["state_dict"]
    for name, parameter in dense.module.named_parameters():
        assert torch.equal(state[name], parameter)


def test_a_program_neither_follows_the_module_nor_is_kept_from_when_it_was_another():
    x = torch.randn(4, 6)
    dense = exported(build(), x)
    before, was = copy.deepcopy(dense.module.state_dict()), dense.module(x).detach()
    with torch.no_grad():
        dense.module[0].weight.mul_(-3)
    assert dense.dynamic  # says a program
    dense.module.load_state_dict(before)
    program = dense.program.module()
    torch.testing.assert_close(program(x), was)
    with torch.no_grad():
        dense.module[0].weight.mul_(-3)
    torch.testing.assert_close(program(x), was)
    assert not torch.allclose(dense.program.module()(x), was)


def test_params_are_those_that_the_module_has_now():
    dense = exported(build(), torch.randn(4, 6))
    assert dense.params == sum(p.numel() for p in dense.module.parameters())
    dense.module[3] = nn.Linear(dense.module[3].in_features, 7)
    assert dense.params == sum(p.numel() for p in dense.module.parameters())


@pytest.mark.parametrize("write", ["save_onnx", "save", "save_pretrained"])
@pytest.mark.one_in(3)
def test_a_module_with_other_layers_than_were_exported_is_not_written(write, tmp_path):
    dense = exported(build(), torch.randn(4, 6))
    dense.module[3] = nn.Linear(dense.module[3].in_features, 7)
    with pytest.raises(UsageError, match=r"3\.weight is 7×\d+, and was 3×\d+"):
        getattr(dense, write)(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_module_of_nan_is_named_as_the_cause(tmp_path):
    dense = exported(build(), torch.randn(4, 6))
    with torch.no_grad():
        dense.module[0].weight[0, 0] = float("nan")
    with pytest.raises(CertificateError, match="a nan or an infinity among the weights") as found:
        dense.save_onnx(tmp_path / "m.onnx")
    assert str(found.value).startswith("The onnx does not compute what the exported module as")
    assert not (tmp_path / "m.onnx").exists()
