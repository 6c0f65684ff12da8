"""Artifacts: what was saved is what is loaded, bit by bit, and nothing else is."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch
import torchvision
from hostile import Touch
from torch import nn

import l0prune
from l0prune.errors import AlreadyGated, FileError, UsageError
from l0prune.files.tensor_file import read_tensors, read_texts, write_tensors


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


class Marked(nn.Module):
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
    model = gate(Marked(), torch.randn(2, 6))
    l0prune.save(model, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"Marked.*--trust-pickle"):
        l0prune.load(tmp_path / "a.pt")
    trusted = l0prune.load(tmp_path / "a.pt", trust_pickle=True)
    assert_same(model, trusted)
    assert trusted.c._parameters["weight"] is trusted.b._parameters["weight"]
    assert trusted.b._parameters["weight"].no_decay
    assert torch.equal(trusted.scale, model.scale)
    skeleton = Marked()
    assert l0prune.load(tmp_path / "a.pt", skeleton) is skeleton
    assert_same(model, skeleton)
    assert skeleton.c._parameters["weight"] is skeleton.b._parameters["weight"]


def test_memory_format_stays(tmp_path):
    """Strides, also of dims of size 1, which fused optimizers compare."""
    layers = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    before = {name: weight.stride() for name, weight in model.named_parameters()}
    gate(model, torch.randn(2, 1, 8, 8))
    l0prune.save(model, tmp_path / "a.pt")
    loaded = l0prune.ungate(l0prune.load(tmp_path / "a.pt"))
    assert {name: weight.stride() for name, weight in loaded.named_parameters()} == before


@pytest.mark.slow
def test_weights_are_stored_once(tmp_path):
    for model in (nn.Sequential(nn.Linear(1000, 250), nn.ReLU(), nn.Linear(250, 2)), Large()):
        gate(model, torch.randn(2, 1000))
        l0prune.save(model, tmp_path / "a.pt")
        assert os.path.getsize(tmp_path / "a.pt") < 1.2 * 4 * 250_000


class Large(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1000, 250), nn.ReLU(), nn.Linear(250, 2))


def test_a_model_that_picks_its_channels(tmp_path):
    """So does every layer whose inputs were cut one by one, in the next round."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x = images()
    gate(model, x)
    l0prune.fit(model, "params=0.7", l0prune.score(model, "magnitude"))
    small = l0prune.export(model).module
    gate(small, x)
    l0prune.save(small, tmp_path / "a.pt")
    assert any("Pick" in repr(site.layout) for site in l0prune.gates(small).plan.sites)
    twin = l0prune.load(tmp_path / "a.pt", l0prune.ungate(small))
    assert "Pick" in repr(l0prune.gates(twin).plan.sites)


def test_a_model_without_gates(tmp_path):
    model = network()
    l0prune.save(model, tmp_path / "a.pt")
    loaded = l0prune.load(tmp_path / "a.pt")
    assert repr(loaded) == repr(model)
    before, after = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
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


def content_of(path):
    return json.loads(read_texts(path)["l0prune"])


def change(path, tensors=None, **changes):
    content = content_of(path)
    gates = {**content["gates"], **changes.pop("gates", {})}
    texts = {"l0prune": json.dumps({**content, "gates": gates, **changes})}
    write_tensors(path, {**read_tensors(path), **(tensors or {})}, texts)


def plan_with(path, **changes):
    return {"plan": {**content_of(path)["gates"]["plan"], **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, r"newer l0prune \(format 99.*pip install --upgrade"),
        ({"version": "1"}, "damaged"),
        ({"version": 0}, "damaged"),
        ({"info": 3}, "damaged: info missing or of the wrong type"),
        ({"training": [1]}, r"damaged: training\.0"),
        ({"frozen": None}, "damaged: frozen"),
        ({"ties": {"1.bias": "nothing"}}, "damaged"),
        ({"notes": {"1.bias": {"dtype": "load"}}}, "damaged"),
        ({"notes": {"1.bias": {"dtype": "int64"}}}, "damaged|do not fit"),
        ({"notes": {"0.weight": {"order": [3, 3, 3, 3]}}}, "damaged"),
        ({"tensors": {"l0prune:structure": torch.zeros(9, dtype=torch.uint8)}}, "damaged"),
        ({"tensors": {"1.weight": torch.zeros(6, dtype=torch.int64)}}, r"\(6,\) of int64 in the"),
        ({"structure": None}, "damaged"),
        ({"structure": {"is_ordinary": True, "hollow": ["no.such.tensor"]}}, "damaged"),
        ({"gates": {"plan": {}}}, "no plan"),
        ({"gates": {"plan": 1}}, r"damaged: gates\.plan"),
        ({"gates": {"gate": {"name": "of tomorrow"}}}, "newer version"),
        ({"gates": {"gate": {"name": "hard_concrete", "speed": 3}}}, "speed"),
        ({"gates": {"gate": "["}}, "damaged"),
        ({"gates": {"example": {"tensor": "1.weight"}}}, "damaged"),
        ({"gates": {"example": {"tensor": "nothing"}}}, "damaged"),
        ({"gates": {"example": {"tuple": [[], []]}}}, "damaged"),
        ({"tensors": {"l0prune_gates.log_alpha": torch.zeros(6)}}, "gates where the plan has"),
    ],
)
@pytest.mark.one_in(3)
def test_damaged_artifacts(gated, tmp_path, changes, message):
    l0prune.save(gated, tmp_path / "a.pt")
    change(tmp_path / "a.pt", **changes)
    of_structure = "structure" in changes or "l0prune:structure" in changes.get("tensors", ())
    skeleton = None if of_structure or "info" in changes else network()
    with pytest.raises(FileError, match=message):
        l0prune.load(tmp_path / "a.pt", skeleton)
    assert skeleton is None or repr(skeleton) == repr(network())


ENDLESS = 10**12


def axis(size, start):
    return {"name": "a", "kind": "neuron", "size": size, "start": start, "group_size": 1}


def site(layout, dim=1, role="read"):
    return {"tensor": "4.weight", "dim": dim, "layout": layout, "role": role}


def cost(scale, layout, unit="params"):
    return {"owner": "4", "unit": unit, "scale": scale, "dims": [layout], "tensor": "4.weight"}


def activation(scale, layout, made, last):
    return {"owner": "4", "scale": scale, "dims": [layout], "made": made, "last": last}


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": [axis(ENDLESS, 0)]},
        {"axes": [axis(8, 4)]},
        {"axes": [axis(-8, 0)]},
        {"axes": [axis(8.0, 0)]},
        {"sites": [site(ENDLESS)]},
        {"sites": [site(["prod", 10**6, 10**6])]},
        {"sites": [site(["cat"])]},
        {"sites": [site(["slots", 0, 0, ENDLESS])]},
        {"sites": [site(["slots", 99, 0, 1])]},
        {"sites": [site(["slots", -1, 0, 1])]},
        {"sites": [site(["gated", 216, 2])]},
        {"sites": [site(["pick", 216, [*range(215), 216]])]},
        {"sites": [site(["pick", 216, [*range(215), -1]])]},
        {"sites": [site(["pick", 216, [*range(215), 0.0]])]},
        {"sites": [site(["prod", *[["cat", 216]] * 9])]},
        {"sites": [site(216, dim=-1)]},
        {"sites": [site(216, role="burn")]},
        {"sites": [site(["prod", 216, *[["slots", 0, 0, 1]] * 10**5])]},
        {"tensors": {"4.weight": [8, ENDLESS]}},
        {"costs": [cost(1.0, ENDLESS)]},
        {"costs": [cost(float("nan"), 8)]},
        {"costs": [cost(-1.0, 8)]},
        {"costs": [cost(1.0, 8, unit="watts")]},
        {"activations": [activation(1.0, ENDLESS, 0, 1)]},
        {"activations": [activation(float("inf"), 8, 0, 1)]},
        {"activations": [activation(1.0, 8, 0, 10**15)]},
        {"activations": [activation(1.0, 8, 3, 1)]},
        {"aliases": {"a": 1}},
        {"parts": ["a\x1b[2J"]},
    ],
)
@pytest.mark.one_in(3)
def test_a_plan_that_no_survey_could_make(gated, tmp_path, changes):
    l0prune.save(gated, tmp_path / "a.pt")
    if "axes" in changes:
        size = min(abs(int(changes["axes"][0]["size"])), 99)
        tensors = {"l0prune_gates.log_alpha": torch.zeros(size)}
    else:
        tensors = {}
    change(tmp_path / "a.pt", tensors, gates=plan_with(tmp_path / "a.pt", **changes))
    with pytest.raises(FileError, match="damaged"):
        l0prune.load(tmp_path / "a.pt")


def test_lists_without_end_are_damage(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    deep = "[" * 10**5 + "]" * 10**5
    text = json.dumps({**content_of(tmp_path / "a.pt"), "info": {"a": 1}}).replace("1}", deep + "}")
    write_tensors(tmp_path / "a.pt", read_tensors(tmp_path / "a.pt"), {"l0prune": text})
    with pytest.raises(FileError, match="damaged"):
        l0prune.read_info(tmp_path / "a.pt")


def test_content_that_is_no_json(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    for text in ("{", "3", "[]", "{}", '{"version": 2}'):
        write_tensors(tmp_path / "a.pt", {}, {"l0prune": text})
        for read in (l0prune.read_info, l0prune.load):
            with pytest.raises(FileError, match="damaged"):
                read(tmp_path / "a.pt")


def test_gates_of_another_plan(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    plan = l0prune.survey(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3)).plan
    change(
        tmp_path / "a.pt",
        {"l0prune_gates.log_alpha": torch.zeros(plan.size)},
        gates={"plan": json.loads(plan.to_json())},
    )
    with pytest.raises(FileError, match=r"the plan was made for another model"):
        l0prune.load(tmp_path / "a.pt")


def test_a_hostile_artifact_runs_nothing(gated, tmp_path):
    marker = tmp_path / "marker"
    l0prune.save(gated, tmp_path / "a.pt")
    torch.save(Touch(marker), tmp_path / "inner.pt")
    inner = torch.frombuffer(bytearray((tmp_path / "inner.pt").read_bytes()), dtype=torch.uint8)
    change(tmp_path / "a.pt", {"l0prune:structure": inner})
    for trust in (False, True):  # what claims to be ordinary needs no trust, and gets none
        with pytest.raises(FileError, match=r"a\.pt was not loaded: it names posix\.system"):
            l0prune.load(tmp_path / "a.pt", trust_pickle=trust)
    assert not marker.exists()


def test_the_same_model_gives_the_same_file(gated, tmp_path):
    for name in ("a.pt", "b.pt"):
        l0prune.save(gated, tmp_path / name, {"b": 1, "a": [float("inf")]})
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert l0prune.read_info(tmp_path / "a.pt") == {"b": 1, "a": [float("inf")]}


def test_the_weights_in_a_file_can_be_read_by_anybody(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    tensors = safetensors.torch.load_file(tmp_path / "a.pt")
    for name, value in gated.state_dict().items():
        assert torch.equal(tensors[name], value), name


class Keeping(nn.Linear):
    """What it adds to the state_dict is no tensor."""

    kept: object = None

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def test_what_modules_add_to_the_state_comes_back(tmp_path):
    model = gate(nn.Sequential(Keeping(4, 5), nn.Linear(5, 2)), torch.randn(2, 4))
    model[0].kept = {"n": (1, 2.5, None, True), 3: [torch.arange(3), 1 - 2j, float("-inf"), "ä"]}
    l0prune.save(model, tmp_path / "a.pt")
    skeleton = nn.Sequential(Keeping(4, 5), nn.Linear(5, 2))
    kept = l0prune.load(tmp_path / "a.pt", skeleton)[0].kept
    assert torch.equal(kept[3].pop(0), torch.arange(3))
    assert kept == {"n": (1, 2.5, None, True), 3: [1 - 2j, float("-inf"), "ä"]}
    assert type(kept["n"][3]) is bool
    model[0].kept = object()
    with pytest.raises(FileError, match=r"the state_dict, under 0\._extra_state, holds a object"):
        l0prune.save(model, tmp_path / "b.pt")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_numbers_that_safetensors_does_not_know(dtype, tmp_path):
    model = nn.Linear(3, 3)
    model.register_buffer("rare", torch.arange(6.0).view(2, 3).to(dtype).t())
    model.register_buffer("scalar", torch.tensor(1.0).to(dtype))
    l0prune.save(model, tmp_path / "a.pt")
    loaded = l0prune.load(tmp_path / "a.pt")
    assert loaded.rare.stride() == (1, 3)
    for name in ("rare", "scalar"):
        mine, yours = getattr(model, name), getattr(loaded, name)
        assert mine.dtype == yours.dtype
        assert torch.equal(mine.to(torch.complex128), yours.to(torch.complex128))


def test_a_model_of_meta_tensors_has_nothing_to_save(tmp_path):
    with pytest.raises(FileError, match="tensor without ordinary entries"):
        l0prune.save(nn.Linear(2, 2, device="meta"), tmp_path / "a.pt")


def test_a_truncated_artifact_is_refused(gated, tmp_path):
    l0prune.save(gated, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    for read in (l0prune.load, l0prune.read_info):
        with pytest.raises(FileError, match="truncated"):
            read(tmp_path / "a.pt")


def test_other_files_are_no_artifacts(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "a.pt")
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        for read in (l0prune.load, l0prune.read_info):
            with pytest.raises(FileError, match=r"no gated model.*l0prune gate"):
                read(tmp_path / name)
