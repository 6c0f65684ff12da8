"""The times of an exported file beside those of the dense network's."""

import json
import os

import onnx
import pytest
import torch
from round_trips import metadata
from timed_network import gated
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning
from l0prune.exporting.onnx import collect, speedup, times
from l0prune.exporting.onnx.times import Times, in_turns
from l0prune.progress.stages import watched


def made(dense, small):
    return Times(tuple(dense), tuple(small), 1, 1, "onnxruntime 1.0", "a processor")


def mlp(budget="macs=0.5"):
    """A gated network of three layers, with as many slots open as a budget leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
    model.append(nn.Linear(40, 3))
    model = l0prune.gate(model.eval(), (torch.randn(2, 8),))
    gates = l0prune.gates(model)
    if budget:
        l0prune.fit(model, budget, torch.arange(gates.plan.size).float())
    return model


def test_a_saved_file_says_what_it_is_worth(tmp_path, timed):
    small = l0prune.export(mlp())
    assert "\n" not in str(small)
    assert (small.asked, small.speedup) == (("macs=0.5",), None)
    stages = []
    with watched(lambda each: stages.append(each.name)):
        (file,) = small.save_onnx(tmp_path / "model.onnx")
    assert "timing the file beside the dense one" in stages
    assert os.listdir(tmp_path) == ["model.onnx"]
    ideal = small.macs_before / small.macs
    said = str(small)
    assert said.startswith(repr(small))
    assert f"asked macs=0.5, ideal by MACs {ideal:.2f} times; 1 thread, batch 1" in said
    facts = metadata(file)
    assert json.loads(facts["l0prune.speedup"]) == small.to_dict()["speedup"]
    assert json.loads(facts["l0prune.times"])["small"] == list(small.times.small)
    assert small.to_dict()["speedup"]["ideal"] == ideal
    assert small.report().content.gain.time.ideal == ideal
    assert not small.note


def test_nothing_is_timed_when_told_not_to(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(collect.Network, "median", None)
    small = l0prune.export(mlp())
    small.save_onnx(tmp_path / "model.onnx", time=False)
    assert (small.times, small.note) == (None, "")
    assert str(small) == repr(small)
    assert not metadata(tmp_path / "model.onnx").keys() & {"l0prune.times", "l0prune.speedup"}


def test_a_file_that_cannot_be_timed_is_written_all_the_same(tmp_path, timed, monkeypatch):
    def median(*_):
        raise collect.FellBack("a provider is missing")

    monkeypatch.setattr(collect.Network, "median", median)
    small = l0prune.export(mlp())
    small.save_onnx(tmp_path / "model.onnx")
    assert small.note == "Not timed: FellBack: a provider is missing"
    assert (tmp_path / "model.onnx").exists()
    monkeypatch.setattr(times, "_LARGEST", 100)
    small.save_onnx(tmp_path / "model.onnx")
    assert "the dense network has 0.0 GB of weights in float32" in small.note
    monkeypatch.undo()
    small.save_onnx(tmp_path / "model.onnx", time=False)
    assert not small.note


@pytest.mark.slow
def test_the_dense_network_is_written_once_and_without_its_weights(monkeypatch):
    written = []
    write = times.write_runnable
    monkeypatch.setattr(times, "write_runnable", lambda *a: (written.append(a[1]), write(*a)))
    model = mlp()
    small = l0prune.export(model)
    dense, sizes = small._dense, small.pieces[0].sizes
    assert all(p.is_meta for p in dense._module.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # the file is of no weights of the model
    files = [dense.file(sizes, None), dense.file(sizes, None), dense.file(sizes, 19)]
    assert files == written[:1] * 3
    assert len(written) == 2
    weights = onnx.load(files[0]).graph.initializer
    shapes = sorted(tuple(tensor.dims) for tensor in weights if len(tensor.dims) == 2)
    assert shapes == [(3, 40), (40, 8), (40, 40)]
    folder = files[0].parent
    del dense, small
    assert not folder.exists()


@pytest.mark.slow
def test_a_file_is_timed_beside_the_dense_one(tmp_path, monkeypatch, timed):
    seen = []

    def turns(networks, given):
        runs = [each.session.run(None, times.feed_of(each, given)) for each in networks.values()]
        seen.append((given[0].shape, [len(outputs[0]) for outputs in runs]))
        return {"own": [1.0, 1.1, 1.0], "dense": [2.0, 2.2, 2.1]}

    monkeypatch.setattr(times, "turns_of", turns)
    model = gated()
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 3 > 0)
    dense = l0prune.export(model)
    dense.save_onnx(tmp_path / "model.onnx")
    assert seen == [((1, 3, 12, 12), [1, 1])]
    assert (dense.times.dense, dense.times.small) == ((2.0, 2.2, 2.1), (1.0, 1.1, 1.0))
    assert dense.times.share == 0.5
    assert json.loads(metadata(tmp_path / "model.onnx")["l0prune.times"])["dense"] == [
        2.0,
        2.2,
        2.1,
    ]
    assert dense.to_dict()["times"]["small"] == (1.0, 1.1, 1.0)
    assert (
        "2 → 1 ms (2.00 times as fast; median of 3 alternating runs, interquartile range 2%)"
        in str(dense.times)
    )
    assert dense.files == (tmp_path / "model.onnx",)
    assert dense.times.dense_bytes > 1000
    assert all(check.inputs == ((check.batch, 3, 12, 12),) for check in dense.certificate.checks)
    assert dense.asked == ()


@pytest.mark.slow
def test_a_file_that_is_not_faster_is_said(tmp_path, monkeypatch, timed):
    slow = {"own": [3.0, 3.0, 3.0], "dense": [2.0, 2.0, 2.0]}
    monkeypatch.setattr(times, "turns_of", lambda *_: slow)
    monkeypatch.setattr(speedup, "are_in_blocks", lambda *_: False)  # whatever the processor is
    model = gated()
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 3 > 0)
    small = l0prune.export(model)
    with pytest.warns(L0pruneWarning, match="not faster than the dense network"):
        small.save_onnx(tmp_path / "model.onnx")
    assert "round_to" in small.speedup.warning


@pytest.mark.slow
def test_a_later_round_is_beside_the_dense_network_of_the_first(tmp_path, timed):
    first, small = mlp(budget=None), l0prune.export(mlp())
    again = l0prune.gate(small.module, (torch.randn(2, 8),))
    l0prune.fit(again, "macs=0.5", torch.arange(l0prune.gates(again).plan.size).float())
    last = l0prune.export(again)
    last.save_onnx(tmp_path / "model.onnx", beside=first)
    assert last.speedup.macs == (8 * 40 + 40 * 40 + 40 * 3, last.macs)
    last.save_onnx(tmp_path / "model.onnx")
    assert last.speedup.macs == (last.macs_before, last.macs)


def test_what_gates_were_asked_for_is_in_their_file(tmp_path):
    model = mlp()
    l0prune.save(model, tmp_path / "gated.pt")
    again = l0prune.load(tmp_path / "gated.pt")
    assert l0prune.gates(again).asked == ("macs=0.5",)
    l0prune.gates(again).set_open("0", [0, 1])
    assert l0prune.gates(again).asked == ()


def test_turns_that_were_disturbed_do_not_count():
    found = made((2.0, 2.0, 9.0, 4.0, 2.0), (1.0, 7.0, 1.0, 2.0, 1.2))
    assert (found.share, found.before, found.after) == (0.5, 2.0, 1.0)
    assert "median of 5 alternating runs, interquartile range 20%" in str(found)


@pytest.mark.parametrize(("ms", "calls"), [(1000.0, 1), (50.0, 1), (3.0, 10)])
def test_slow_networks_take_few_turns(ms, calls):
    spent = {"dense": [], "own": []}

    def network(name, ms):
        def median(count):
            spent[name].append(count)
            return ms

        return median

    found = in_turns({"dense": network("dense", 2 * ms), "own": network("own", ms)}, 1.0)
    assert set(found["own"]) == {ms}
    assert set(found["dense"]) == {2 * ms}
    assert spent["own"][-1] == calls
    assert len(found["own"]) == len(found["dense"]) >= 3
    whole = ms * sum(spent["own"]) + 2 * ms * sum(spent["dense"])
    assert whole <= max(1.3e3, 4 * 3 * ms)


def test_fast_networks_take_longer_turns_rather_than_thousands():
    counts = []

    def median(times, ms=0.007):
        counts.append(times)
        return ms

    found = in_turns({"one": median, "other": median}, 1.5)
    assert len(found["one"]) == len(found["other"]) == 100
    assert sum(counts) * 0.007 == pytest.approx(1500, rel=0.3)
