"""Artifacts: what was saved is what is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import FileError


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


@pytest.fixture
def gated():
    model = l0prune.gate(network(), torch.randn(2, 1, 8, 8), open_probability=0.5)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    return model


def test_a_gated_model_comes_back_bit_by_bit(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt", {"note": "ä", "n": 3})
    loaded = l0prune.load(tmp_path / "a.pt")
    first, second = gated.state_dict(), loaded.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [m.training for m in loaded.modules()] == [m.training for m in gated.modules()]
    frozen = [n for n, p in loaded.named_parameters() if not p.requires_grad]
    assert frozen == ["0.weight"]
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(loaded.eval()(x), gated.eval()(x))
    assert l0prune.gates(loaded).plan == l0prune.gates(gated).plan
    assert l0prune.read_info(tmp_path / "a.pt") == {"note": "ä", "n": 3}


def test_saving_leaves_the_model_gated(gated, tmp_path):
    before = [module.__class__ for module in gated.modules()]
    l0prune.save(gated, tmp_path / "a.pt")
    assert [module.__class__ for module in gated.modules()] == before
    assert l0prune.gates(gated)


def test_a_class_of_ones_own_needs_the_model(tmp_path):
    class Mine(nn.Sequential):
        pass

    Mine.__qualname__ = "Mine"
    globals()["Mine"] = Mine
    model = Mine(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    l0prune.gate(model, torch.randn(2, 4))
    l0prune.save(model, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"Mine.*--trust-pickle"):
        l0prune.load(tmp_path / "a.pt")
    skeleton = Mine(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    loaded = l0prune.load(tmp_path / "a.pt", skeleton)
    assert loaded is skeleton
    assert torch.equal(loaded.state_dict()["0.weight"], model.state_dict()["0.weight"])
    trusted = l0prune.load(tmp_path / "a.pt", trust_pickle=True)
    assert torch.equal(l0prune.gates(trusted).log_alpha, l0prune.gates(model).log_alpha)


def test_a_model_built_by_code_is_saved_as_its_weights(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))\n"
    )
    from l0prune.models import load_model

    spec = f"{tmp_path}/net.py:build"
    model = l0prune.gate(load_model(spec), torch.randn(2, 4))
    l0prune.save(model, tmp_path / "a.pt", {"model": spec})
    loaded = l0prune.load(tmp_path / "a.pt")
    assert torch.equal(loaded.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_a_newer_version_is_refused(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save({**content, "l0prune": 99}, tmp_path / "a.pt")
    with pytest.raises(FileError, match="newer l0prune"):
        l0prune.load(tmp_path / "a.pt")


def test_a_truncated_artifact_is_refused(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="truncated"):
        l0prune.load(tmp_path / "a.pt")


def test_another_torch_file_is_no_artifact(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(FileError, match="no gated model"):
        l0prune.load(tmp_path / "a.pt")
