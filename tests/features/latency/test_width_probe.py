"""The probe of widths, where its times are kept, and that every door rounds by default."""

import json
import sys
from math import ceil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import l0prune
from l0prune.errors import FileError, UsageError
from l0prune.features.latency import width_probe
from l0prune.features.latency.runtimes import RUNTIMES
from l0prune.files.checked_json import sealed
from l0prune.plan.targets import targets
from l0prune.plan.width_times import CONV

FEW = (4, 7, 8, 16, 27, 128)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Each test starts without times, and with a probe of few widths."""
    monkeypatch.delenv("L0PRUNE_WIDTHS")
    monkeypatch.setattr(width_probe, "WIDTHS", FEW)
    width_probe.width_times.cache_clear()
    yield
    width_probe.width_times.cache_clear()


@pytest.fixture
def stairs(tmp_path, monkeypatch):
    """A runtime that computes whole blocks of eight, of each kind of layer."""
    widths = sorted({*range(4, 129, 4), *range(5, 129, 6)})
    times = {kind: {str(w): 8.0 * ceil(w / 8) for w in widths} for kind in width_probe.KINDS}
    data = {"target": "x", "origin": "made up", "times": times, "macs": {}, "memory": 1e30}
    path = tmp_path / "widths.json"
    path.write_text(json.dumps(sealed(data)), encoding="utf-8")
    monkeypatch.setenv("L0PRUNE_WIDTHS", str(path))
    return path


def test_every_target_is_a_runtime_and_every_runtime_a_target():
    assert set(targets()) == set(RUNTIMES)


def test_onnx_runtime_is_timed_once_and_the_times_are_kept():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = width_probe.width_times("onnxruntime")
    assert torch.equal(torch.get_rng_state(), before)
    assert "timed here" in found.origin
    assert set(found.times) == set(width_probe.KINDS)
    assert all(ms > 0 for times in found.times.values() for ms in times.values())
    assert found.times[CONV][128] > found.times[CONV][8]
    width_probe.width_times.cache_clear()
    assert width_probe.width_times("onnxruntime") == found


def test_pytorch_on_the_cpu_is_timed():
    assert "timed here" in width_probe.width_times("eager").origin


@pytest.mark.parametrize("target", targets())
def test_each_target_has_usual_times(target):
    usual = width_probe.usual(target)
    assert "not timed here" in usual.origin
    assert all(1 <= usual.block([kind], 256) <= 32 for kind in width_probe.KINDS)


@pytest.mark.parametrize("target", ["cuda-graph", "executorch"])
def test_a_target_that_is_not_here_or_slow_to_prepare_takes_the_usual_times(target):
    if target == "cuda-graph" and torch.cuda.is_available():
        pytest.skip("this machine has the target")
    assert "usual" in width_probe.width_times(target).origin


def test_without_onnx_runtime_the_usual_times_are_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "usual" in width_probe.width_times("onnxruntime").origin


def test_a_busy_machine_slows_rounds_and_not_the_result(monkeypatch):
    generator = np.random.default_rng(0)

    def prepare(network, shape):
        width = len(network[0].weight) if hasattr(network[0], "weight") else 1
        return lambda times: ceil(width / 16) * generator.choice([1.0, 5.0])

    monkeypatch.setattr(width_probe, "_preparer", lambda runtime, folder: prepare)
    monkeypatch.setattr(width_probe, "_ROUNDS", 12)
    found = width_probe.probed("x", None, "x").times[CONV]
    assert found == {width: ceil(width / 16) for width in FEW}


def test_a_state_folder_that_cannot_be_written_costs_only_the_next_process_time(
    tmp_path, monkeypatch
):
    (tmp_path / "a file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a file"))
    assert "timed here" in width_probe.width_times("onnxruntime").origin


def test_damaged_times_are_timed_again():
    found = width_probe.width_times("onnxruntime")
    (path,) = width_probe.place("x").parent.glob("*.json")
    path.write_text(path.read_text(encoding="utf-8").replace("memory", "money"), encoding="utf-8")
    width_probe.width_times.cache_clear()
    assert width_probe.width_times("onnxruntime").times.keys() == found.times.keys()
    assert "memory" in path.read_text(encoding="utf-8")


def test_times_of_another_machine_are_read_from_the_file_that_is_named(stairs, monkeypatch):
    assert width_probe.width_times("openvino").origin == "made up"
    width_probe.width_times.cache_clear()
    stairs.write_text("{}", encoding="utf-8")
    with pytest.raises(FileError, match="damaged"):
        width_probe.width_times("openvino")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 40, 3), nn.ReLU(), nn.Conv2d(40, 48, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 36), nn.ReLU(), nn.Linear(36, 4),
    )  # fmt: skip


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 1, 8, 8, generator=generator), torch.arange(48) % 4)


def gated():
    model = network()
    l0prune.gate(model, (torch.randn(2, 1, 8, 8),))
    return model


def by_fit():
    model = gated()
    l0prune.fit(model, "macs=0.5", l0prune.score(model, "magnitude"))
    return model


def by_scores_and_params():
    model = gated()
    l0prune.fit(model, "params=0.4", l0prune.score(model, "magnitude"))
    return model


def by_finetune(**settings):
    model = gated()
    l0prune.finetune(model, (data(), data()), epochs=2, batch_size=16, report=False, **settings)
    return model


def by_pruner():
    model = gated()
    pruner = l0prune.Pruner(model, budget="macs=0.5", steps=60, gate_lr=1.5)
    optimizer = torch.optim.Adam(pruner.param_groups(lr=1e-3))
    inputs, targets = data().tensors
    for _ in range(60):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
    return model


def widths_of(model):
    return [(int(axis.open.sum()), axis.size) for axis in l0prune.gates(model).axes]


@pytest.mark.parametrize(
    "made",
    [
        by_fit,
        by_scores_and_params,
        by_pruner,
        lambda: by_finetune(budget="macs=0.5"),
        lambda: by_finetune(lam=0.05, gate_lr=2.0),
    ],
    ids=["fit", "params", "Pruner", "finetune", "lambda"],
)
@pytest.mark.one_in(5)
def test_every_door_rounds_by_default(stairs, made):
    widths = widths_of(made())
    assert all(width % 8 == 0 or width == size for width, size in widths)
    assert any(width < size for width, size in widths)


def test_shrink_rounds_by_default(stairs):
    small = l0prune.shrink(network(), torch.randn(512, 1, 8, 8), "macs=0.5")
    convs = [each for each in small.module.modules() if isinstance(each, nn.Conv2d)]
    assert {conv.out_channels % 8 for conv in convs} == {0}
    assert sum(conv.out_channels for conv in convs) < 88


def test_any_width_is_what_round_to_1_gives(stairs):
    model = gated()
    l0prune.fit(model, "macs=0.5", l0prune.score(model, "magnitude"), round_to=1)
    assert any(width % 8 and width != size for width, size in widths_of(model))


def test_a_width_that_is_given_in_slots_is_that_width(stairs):
    model = gated()
    l0prune.fit(model, "0: width=21", l0prune.score(model, "magnitude"))
    assert widths_of(model)[0] == (21, 40)


def test_a_target_that_is_none_is_refused():
    model = gated()
    for call in (
        lambda: l0prune.fit(
            model, "macs=0.5", l0prune.score(model, "magnitude"), target="tensorrt"
        ),
        lambda: l0prune.Pruner(model, budget="macs=0.5", steps=3, target="tensorrt"),
        lambda: l0prune.shrink(network(), data().tensors[0], "macs=0.5", target="tensorrt"),
    ):
        with pytest.raises(UsageError, match=r"target is one of onnxruntime, .*not 'tensorrt'"):
            call()
