"""Artifacts: what was saved is what is loaded, bit by bit, and nothing else is."""

from __future__ import annotations

import os

import pytest
import torch
import torchvision
from hostile import Touch
from torch import nn

import l0prune
from l0prune.errors import AlreadyGated, FileError, UsageError


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(216, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def images(count=2):
    return torch.randn(count, 1, 8, 8)


def gate(model, *args, **kwargs):
    return l0prune.gate(model, args, open_probability=0.5, jitter=1.0, **kwargs)


@pytest.fixture
def gated():
    model = gate(network(), images())
    with torch.no_grad():
        model(images(16))  # BatchNorm's statistics are no longer those of a new one
    model[1].eval()
    model[0].weight.requires_grad_(False)
    return model


def assert_same(first, second):
    """Same tensors, dtypes, names, modes, flags and ties."""
    states = first.state_dict(), second.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert value.dtype == states[1][name].dtype, name
        assert torch.equal(value, states[1][name]), name
    modes = [[(n, m.training) for n, m in x.named_modules()] for x in (first, second)]
    assert modes[0] == modes[1]
    flags = [[(n, p.requires_grad) for n, p in x.named_parameters()] for x in (first, second)]
    assert flags[0] == flags[1]
    mine, yours = l0prune.gates(first), l0prune.gates(second)
    assert mine.plan == yours.plan
    assert mine.gate == yours.gate
    assert mine.fixed == yours.fixed


def test_a_gated_model_comes_back_bit_by_bit(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt", {"note": "ä", "n": 3})
    loaded = l0prune.load(tmp_path / "a.pt")
    assert_same(gated, loaded)
    frozen = [n for n, p in loaded.named_parameters() if not p.requires_grad]
    assert frozen == ["0.weight"]
    x = images(4)
    assert torch.equal(loaded.eval()(x), gated.eval()(x))
    assert l0prune.read_info(tmp_path / "a.pt") == {"note": "ä", "n": 3}


def test_training_goes_on_as_if_nothing_had_happened(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    losses = []
    x, y = images(16), torch.arange(16) % 3
    for model in (gated, l0prune.load(tmp_path / "a.pt")):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(l0prune.param_groups(model, lr=0.01))
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), y)
            loss = loss + l0prune.penalty(model, 1e-3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_the_gates_own_settings(gated, tmp_path):
    bank = l0prune.gates(gated)
    bank.fixed = True
    bank.log_alpha.requires_grad_(False)
    bank.eval()
    l0prune.save(gated, tmp_path / "a.pt")
    loaded = l0prune.load(tmp_path / "a.pt")
    assert_same(gated, loaded)
    example = l0prune.gates(loaded).example
    assert torch.equal(example[0][0], bank.example[0][0])
    assert example[1] == {}


def test_an_estimator_that_is_not_the_default(tmp_path):
    kind = l0prune.HardConcrete(beta=0.5, estimator="median")
    model = gate(network(), images(), gate=kind)
    l0prune.save(model, tmp_path / "a.pt")
    assert l0prune.gates(l0prune.load(tmp_path / "a.pt")).gate == kind


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_stay(dtype, tmp_path):
    model = gate(network().to(dtype), images().to(dtype))
    l0prune.save(model, tmp_path / "a.pt")
    assert_same(model, l0prune.load(tmp_path / "a.pt"))
    assert_same(model, l0prune.load(tmp_path / "a.pt", network()))  # a skeleton of float32


class Tied(nn.Module):
    """Two readers with one weight, a buffer that is not saved and a mark on a parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.c.weight = self.b.weight
        self.register_buffer("scale", torch.rand(1), persistent=False)
        self.b.weight.no_decay = True

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu()) * self.scale


def test_ties_buffers_and_marks_stay(tmp_path):
    model = gate(Tied(), torch.randn(2, 6))
    l0prune.save(model, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"Tied.*--trust-pickle"):
        l0prune.load(tmp_path / "a.pt")
    trusted = l0prune.load(tmp_path / "a.pt", trust_pickle=True)
    assert_same(model, trusted)
    assert trusted.c._parameters["weight"] is trusted.b._parameters["weight"]
    assert trusted.b._parameters["weight"].no_decay
    assert torch.equal(trusted.scale, model.scale)
    skeleton = Tied()
    assert l0prune.load(tmp_path / "a.pt", skeleton) is skeleton
    assert_same(model, skeleton)
    assert skeleton.c._parameters["weight"] is skeleton.b._parameters["weight"]


def test_memory_format_stays(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    gate(model.to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 8))
    l0prune.save(model, tmp_path / "a.pt")
    weight = l0prune.load(tmp_path / "a.pt")[2]._parameters["weight"]
    assert not weight.is_contiguous()
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_are_stored_once(tmp_path):
    for model in (nn.Sequential(nn.Linear(1000, 250), nn.ReLU(), nn.Linear(250, 2)), Large()):
        gate(model, torch.randn(2, 1000))
        l0prune.save(model, tmp_path / "a.pt")
        assert os.path.getsize(tmp_path / "a.pt") < 1.2 * 4 * 250_000


class Large(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1000, 250), nn.ReLU(), nn.Linear(250, 2))


def test_a_model_without_gates(tmp_path):
    model = network()
    l0prune.save(model, tmp_path / "a.pt")
    loaded = l0prune.load(tmp_path / "a.pt")
    assert repr(loaded) == repr(model)
    before, after = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_torchvision_model(tmp_path):
    model = gate(torchvision.models.mobilenet_v3_small(num_classes=4), torch.randn(2, 3, 64, 64))
    l0prune.save(model, tmp_path / "a.pt")
    assert_same(model, l0prune.load(tmp_path / "a.pt"))


def test_saving_leaves_the_model_gated(gated, tmp_path):
    before = [module.__class__ for module in gated.modules()]
    state = {name: value.clone() for name, value in gated.state_dict().items()}
    l0prune.save(gated, tmp_path / "a.pt")
    assert [module.__class__ for module in gated.modules()] == before
    assert all(torch.equal(state[name], value) for name, value in gated.state_dict().items())


CODE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
"""


def test_a_model_built_by_code_is_built_by_it_again(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    model = gate(l0prune.load_model("net.py:Net"), torch.randn(2, 4))
    l0prune.save(model, "a.pt", {"model": "net.py:Net"})
    assert_same(model, l0prune.load("a.pt"))
    (tmp_path / "net.py").write_text(CODE.replace("5", "6"))
    with pytest.raises(FileError, match=r"do not fit .*:\n  a.weight: \(5, 4\) in the file"):
        l0prune.load("a.pt", trust_pickle=True)


def test_models_that_no_file_can_hold(tmp_path):
    model = network()
    model.extra = lambda: None
    gate(model, images())
    with pytest.raises(FileError, match=r"cannot be pickled.*--model path.py:factory"):
        l0prune.save(model, tmp_path / "a.pt")
    del model.extra
    l0prune.gates(model).example = ((images(),), {"mode": model})
    with pytest.raises(FileError, match="example inputs hold a Sequential"):
        l0prune.save(model, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="data that JSON can hold"):
        l0prune.save(model, tmp_path / "a.pt", {"x": images()})
    with pytest.raises(UsageError, match="only wraps the gated model"):
        l0prune.save(nn.Sequential(model), tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file(gated, tmp_path, monkeypatch):
    l0prune.save(gated, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    with torch.no_grad():
        l0prune.gates(gated).log_alpha.add_(1)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="the disk is full"):
        l0prune.save(gated, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_gated_model_cannot_be_filled(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    with pytest.raises(AlreadyGated):
        l0prune.load(tmp_path / "a.pt", gated)


def other():
    torch.manual_seed(9)
    return nn.Sequential(*network()[:4], nn.Linear(216, 9), nn.ReLU(), nn.Linear(9, 3)).eval()


@pytest.mark.parametrize("model", [other(), nn.Linear(2, 2)])
def test_another_model_stays_as_it_is(gated, tmp_path, model):
    l0prune.save(gated, tmp_path / "a.pt")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    with pytest.raises(FileError, match="do not fit this model"):
        l0prune.load(tmp_path / "a.pt", model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert list(before) == list(model.state_dict())
    assert [m.training for m in model.modules()] == modes


def change(path, **changes):
    content = torch.load(path, weights_only=True)
    gates = {**content["gates"], **changes.pop("gates", {})}
    torch.save({**content, "gates": gates, **changes}, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l0prune": 99}, r"newer l0prune \(format 99.*pip install --upgrade"),
        ({"l0prune": "1"}, "no gated model"),
        ({"info": 3}, "damaged: info missing or of the wrong type"),
        ({"state": [1]}, "damaged: state"),
        ({"frozen": None}, "damaged: frozen"),
        ({"module": torch.zeros(9, dtype=torch.uint8)}, "damaged"),
        ({"module": "text"}, "damaged"),
        ({"hollow": ["no.such.tensor"]}, "damaged"),
        ({"gates": {"plan": "{}"}}, "no plan"),
        ({"gates": {"plan": 1}}, "damaged: plan"),
        ({"gates": {"gate": '{"name": "of tomorrow"}'}}, "newer version"),
        ({"gates": {"gate": '{"name": "hard_concrete", "speed": 3}'}}, "speed"),
        ({"gates": {"gate": "["}}, "damaged"),
        ({"gates": {"example": torch.zeros(1)}}, "damaged: example"),
    ],
)
def test_damaged_artifacts(gated, tmp_path, changes, message):
    l0prune.save(gated, tmp_path / "a.pt")
    change(tmp_path / "a.pt", **changes)
    skeleton = None if {"module", "hollow", "info"} & set(changes) else network()
    with pytest.raises(FileError, match=message):
        l0prune.load(tmp_path / "a.pt", skeleton)
    assert skeleton is None or repr(skeleton) == repr(network())


def test_information_that_is_no_json(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    for info in ("{", "3"):
        change(tmp_path / "a.pt", info=info)
        with pytest.raises(FileError, match="damaged"):
            l0prune.read_info(tmp_path / "a.pt")


def test_gates_of_another_plan(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", weights_only=True)["state"]
    log_alpha = state["l0prune_gates.log_alpha"]
    change(tmp_path / "a.pt", state={**state, "l0prune_gates.log_alpha": log_alpha[:-1]})
    with pytest.raises(FileError, match="gates where the plan has"):
        l0prune.load(tmp_path / "a.pt")
    plan = l0prune.survey(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3)).plan
    change(
        tmp_path / "a.pt",
        state={**state, "l0prune_gates.log_alpha": torch.zeros(plan.size)},
        gates={"plan": plan.to_json()},
    )
    with pytest.raises(FileError, match=r"the plan was made for another model"):
        l0prune.load(tmp_path / "a.pt")


def test_a_hostile_artifact_runs_nothing(gated, tmp_path):
    marker = tmp_path / "marker"
    l0prune.save(gated, tmp_path / "a.pt")
    torch.save(Touch(marker), tmp_path / "inner.pt")
    inner = torch.frombuffer(bytearray((tmp_path / "inner.pt").read_bytes()), dtype=torch.uint8)
    change(tmp_path / "a.pt", module=inner)
    with pytest.raises(FileError, match=r"a\.pt was not loaded: it names posix\.system"):
        l0prune.load(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save({**content, "info": Touch(marker)}, tmp_path / "a.pt")
    with pytest.raises(FileError, match="system"):
        l0prune.read_info(tmp_path / "a.pt")
    assert not marker.exists()


def test_a_truncated_artifact_is_refused(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    for read in (l0prune.load, l0prune.read_info):
        with pytest.raises(FileError, match="truncated"):
            read(tmp_path / "a.pt")


def test_another_torch_file_is_no_artifact(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"no gated model.*l0prune gate"):
        l0prune.load(tmp_path / "a.pt")
