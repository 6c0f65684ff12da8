"""The time of an exported file beside that of the dense network's."""

import json

import pytest
import torch
from round_trips import metadata
from timed_network import gated

import l0prune
from l0prune.errors import L0pruneWarning
from l0prune.exporting.onnx import collect, times
from l0prune.exporting.onnx.times import Times


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(times, "_SECONDS", 0.01)


def made(dense, small):
    return Times(tuple(dense), tuple(small), 1, 1, "onnxruntime 1.0", "a processor")


@pytest.mark.slow
def test_a_file_is_timed_beside_the_dense_one(tmp_path, monkeypatch):
    seen = []

    def turns(network, dense, inputs, seconds):
        (given,) = inputs.values()
        sizes = [len(each.session.run(None, inputs)[0]) for each in (network, dense)]
        seen.append((given.shape, sizes))
        return {"own": [1.0, 1.1, 1.0], "dense": [2.0, 2.2, 2.1]}

    monkeypatch.setattr(collect, "networks_turns", turns)
    model = gated()
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 3 > 0)
    dense = l0prune.export(model)
    dense.save_onnx(tmp_path / "model.onnx", beside=model)
    assert seen == [((1, 3, 12, 12), [1, 1])]
    assert (dense.times.dense, dense.times.small) == ((2.0, 2.2, 2.1), (1.0, 1.1, 1.0))
    assert dense.times.share == 0.5
    assert json.loads(metadata(tmp_path / "model.onnx")["l0prune.times"])["dense"] == [
        2.0,
        2.2,
        2.1,
    ]
    assert dense.to_dict()["times"]["small"] == (1.0, 1.1, 1.0)
    assert "2 → 1 ms (2.00 times as fast; half of the turns within 2%)" in str(dense.times)
    assert dense.files == (tmp_path / "model.onnx",)
    assert dense.times.dense_bytes > 1000
    assert all(check.inputs == ((check.batch, 3, 12, 12),) for check in dense.certificate.checks)


@pytest.mark.slow
def test_a_file_that_is_not_faster_is_said(tmp_path, monkeypatch):
    slow = {"own": [3.0, 3.0, 3.0], "dense": [2.0, 2.0, 2.0]}
    monkeypatch.setattr(collect, "networks_turns", lambda *_: slow)
    model = gated()
    small = l0prune.export(model)
    with pytest.warns(L0pruneWarning, match="not faster than the dense network"):
        small.save_onnx(tmp_path / "model.onnx", beside=model)
    assert "round_to" in small.times.warning


@pytest.mark.slow
def test_nothing_is_timed_unless_asked_for(tmp_path):
    model = gated()
    small = l0prune.export(model)
    small.save_onnx(tmp_path / "model.onnx")
    assert small.times is None
    assert "l0prune.times" not in metadata(tmp_path / "model.onnx")


def test_turns_that_were_disturbed_do_not_count():
    found = made((2.0, 2.0, 9.0, 4.0, 2.0), (1.0, 7.0, 1.0, 2.0, 1.2))
    assert (found.share, found.before, found.after) == (0.5, 2.0, 1.0)
    assert not found.warning
    assert "half of the turns within 20%" in str(found)
