"""``l0prune shrink``: a network of a file, and inputs without labels."""

import pytest
import torch

import l0prune
from l0prune.errors import L0pruneError

CODE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))

def inputs():
    return torch.randn(200, 8)

def broken():
    return torch.full((200, 8), torch.nan)

def batches():
    return [{"input": each} for each in inputs().split(20)]
"""


@pytest.fixture(autouse=True)
def _file(tmp_path):
    (tmp_path / "net.py").write_text(CODE, encoding="utf-8")


def test_a_file_that_is_smaller_and_how_near_it_is(done, tmp_path):
    options = ("--data", "net.py:inputs", "--budget", "params=0.5", "--json")
    told, _ = done("shrink", "net.py:net", *options)
    assert told["files"] == ["net.small.onnx"]
    assert (tmp_path / "net.small.onnx").is_file()
    assert 0 < told["fidelity"]["error"] < 0.5
    assert told["params"] <= 0.5 * (8 * 32 + 32 + 32 * 3 + 3)
    assert told["speedup"]["asked"] == ["params=0.5"]
    assert len(told["times"]["small"]) >= 3
    (tmp_path / "small").mkdir()
    again, _ = done("shrink", "net.py:net", *options, "--no-time", "--out", "small")
    assert again["files"] == ["small/net.small.onnx"]
    assert (again["speedup"], again["times"]) == (None, None)


@pytest.mark.slow
def test_batches_of_inputs_do_as_the_inputs_themselves(done):
    for data in ("batches", "inputs"):
        options = ("--data", f"net.py:{data}", "--budget", "params=0.5", "--no-time", "--json")
        told, _ = done("shrink", "net.py:net", *options)
        assert 0 < told["fidelity"]["error"] < 0.5
        told, _ = done("shrink", "net.py:net", *options, "--int8")
        assert told["files"] == ["net.small.onnx", "net.small.int8.onnx"]
        assert told["int8"]["errors"]["output"] < 0.1
        assert told["int8"]["compared"] >= 20
    done("gate", "net.py:net", "--data", "net.py:batches")
    done("export", "net.gated.pt", "--onnx", "--int8", "--data", "net.py:batches", "--no-time")


@pytest.mark.slow
def test_the_small_file_is_there_where_no_file_in_eight_bits_can_be(refused, tmp_path, monkeypatch):
    def fails(*_):
        raise L0pruneError("no such file can be")

    monkeypatch.setattr("l0prune.features.int8.file.Int8File.write", fails)
    options = ("--data", "net.py:inputs", "--budget", "params=0.5", "--no-time", "--int8")
    said = refused(1, "shrink", "net.py:net", *options)
    assert "written without what was asked besides: net.small.onnx" in said
    assert "no such file can be" in said
    assert [each.name for each in tmp_path.glob("*.onnx")] == ["net.small.onnx"]


@pytest.mark.slow
def test_a_tolerance_says_that_a_network_may_learn(done):
    asked = "net.py:net", "--data", "net.py:inputs", "--tolerance", "60%", "--measure", "macs"
    for more, is_said in (((), True), (("--recover", "1"), False)):
        _, said = done("shrink", *asked, "--no-time", *more)
        assert ("--recover 8" in said) is is_said


def test_a_folder_that_loads_again(done):
    options = ("--data", "net.py:inputs", "--budget", "params=0.5", "--pretrained", "small")
    told, _ = done("shrink", "net.py:net", *options, "--json")
    assert told["files"] == ["small"]
    assert l0prune.load("small")(torch.zeros(2, 8)).shape == (2, 3)
    told, _ = done("shrink", "net.py:net", *options, "--onnx", "--no-time", "--json")
    assert told["files"] == ["small", "net.small.onnx"]


@pytest.mark.parametrize(
    ("code", "options", "said"),
    [
        (2, (), "--budget macs=0.5"),
        (2, ("--budget", "params=0.5", "--tolerance", "1%"), "in its place"),
        (2, ("--budget", "params=0.001"), "cannot be met"),
        (2, ("--tolerance", "200%"), "between 0 and 1"),
        (2, ("--tolerance", "1%", "--measure", "time"), "macs or latency"),
        (1, ("--budget", "params=0.5", "--data", "net.py:broken"), "not finite"),
        (2, ("--budget", "params=0.5", "--loadable-by", "transformers"), "transformers"),
        (2, ("--budget", "params=0.5", "--class-dim", "2"), "none of the outputs' dims"),
        (
            1,
            ("--budget", "params=0.5", "--out", "nowhere/a.onnx"),
            "nowhere/a.onnx was not written",
        ),
    ],
)
def test_what_is_refused(refused, code, options, said):
    data = () if "--data" in options else ("--data", "net.py:inputs")
    assert said in refused(code, "shrink", "net.py:net", *data, *options)


def test_other_commands_want_labels(refused):
    assert "l0prune shrink" in refused(1, "evaluate", "net.py:net", "--data", "net.py:inputs")


def test_gates_alone_learn_from_inputs_alone(done):
    done("gate", "net.py:net", "--input", "1x8", "--out", "net.gated.pt")
    budget = ("--learn", "gates", "--budget", "params=0.5", "--epochs", "2")
    told, _ = done("finetune", "net.gated.pt", "--data", "net.py:inputs", *budget, "--json")
    before, after = l0prune.load("net.gated.pt"), l0prune.load(told["file"])
    assert int(l0prune.gates(after).open().sum()) < int(l0prune.gates(before).open().sum())
    assert torch.equal(after[0].bias, before[0].bias)


def test_a_dry_run_says_memory_and_time_of_each_step_and_does_none(done, tmp_path):
    options = ("--data", "net.py:inputs", "--budget", "params=0.5", "--dry-run")
    before = sorted(path.name for path in tmp_path.iterdir())
    told, _ = done("shrink", "net.py:net", *options, "--json")
    assert [each["name"] for each in told["steps"]] == ["division", "compensation", "export"]
    assert all(each["seconds"] > 0 for each in told["steps"])
    weights = 4 * (8 * 32 + 32 + 32 * 3 + 3)
    assert (told["weights"], told["examples"]) == (weights, 200)
    assert told["peak"] == max(each["bytes"] for each in told["steps"]) > weights
    assert {*before} >= {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
