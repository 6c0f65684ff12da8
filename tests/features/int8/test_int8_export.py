"""An export in eight bits, from Python and from the command line."""

import copy
import json
from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch
from commands import in_process
from differences import run_onnx
from rich.console import Console
from round_trips import metadata
from timed_network import gated
from torch import nn
from torch.utils.data import TensorDataset

import l0prune
from l0prune.errors import UsageError
from l0prune.exporting.onnx.differences import relative_error
from l0prune.exporting.opened import OnnxFile


@pytest.mark.slow
def test_an_int8_file_lies_beside_the_one_that_is_proven(tmp_path, timed):
    dense = l0prune.export(gated())
    x = torch.randn(64, 3, 12, 12)
    plain, small = tmp_path / "model.onnx", tmp_path / "model.int8.onnx"
    assert dense.save_onnx(plain, int8=x) == dense.files == (plain, small)
    assert dense.certificate.worst(("onnx",), "float32") < 1e-5
    onnx.checker.check_model(onnx.load(small))
    facts = metadata(small)
    recorded = json.loads(facts["l0prune.int8"])
    assert recorded == json.loads(json.dumps(dense.int8.to_dict()))
    assert "l0prune.float32.certificate" in facts
    assert "l0prune.certificate" not in facts
    assert (recorded["calibrated"], recorded["compared"]) == (48, 16)
    unseen = torch.cat([x[start : start + 4] for start in range(12, 64, 16)])
    error = relative_error([tuple(run_onnx(path, unseen)[0].numpy() for path in (plain, small))])
    assert np.isclose(recorded["errors"]["output"], error, rtol=1e-3)
    assert 0 < error < 0.05
    assert np.isclose(min(recorded["compensated"]), error, rtol=1e-3)
    assert "In int8: output" in _shown(dense)
    assert "beside the dense network in float32" in _shown(dense)
    assert dense.int8.beside_dense.dense != dense.int8.times.dense
    assert ("rounding compensated" in _shown(dense)) == dense.int8.is_compensated
    content = dense.report().content
    assert "In int8: output" in content.notes
    assert content.gain.bytes.after == plain.stat().st_size
    dense.save_onnx(plain, int8=x, compensate=False, time=False)
    assert dense.int8.compensated is None
    assert (dense.int8.times, dense.int8.beside_dense, dense.times) == (None, None, None)
    assert "not timed" in str(dense.int8)


@pytest.mark.slow
def test_layers_stay_in_float32_until_the_judge_is_content(tmp_path):
    torch.manual_seed(0)
    widths = [16, 48, 48, 48, 48, 8]
    layers = [each for pair in pairwise(widths)
              for each in (nn.Linear(*pair), nn.Tanh())]  # fmt: skip
    model, x = nn.Sequential(*layers).eval(), torch.randn(96, 16)
    small = l0prune.export(l0prune.gate(copy.deepcopy(model), x[:2]))
    with torch.no_grad():
        wanted = model(x)
    whole = []

    def lost(file):
        return float((file(x) - wanted).square().mean() / wanted.square().mean())

    asked = {"int8": x[:64], "time": False, "fastest": False}
    for tolerance in (0.5, 5e-5, 1e-9):
        small.save_onnx(tmp_path / "net.onnx", **asked, tolerance=tolerance, judge=lost)
        whole.append(len(small.int8.kept))
        found = lost(OnnxFile(tmp_path / "net.int8.onnx"))
        assert found <= tolerance
    assert whole[0] == 0 < whole[1] < whole[2]
    assert found < 1e-11  # all of it in float32
    with pytest.raises(UsageError, match=r"int8 was given none.*in Python, a judge"):
        small.save_onnx(tmp_path / "net.onnx", **asked, tolerance="1%")
    with pytest.raises(UsageError, match="within a tolerance: give one"):
        small.save_onnx(tmp_path / "net.onnx", **asked, judge=lost)


@pytest.mark.slow
def test_labelled_data_judge_by_their_metric(tmp_path):
    torch.manual_seed(0)
    layers = [each for pair in pairwise((16, 48, 48, 4))
              for each in (nn.Linear(*pair), nn.Tanh())]  # fmt: skip
    model, x = nn.Sequential(*layers[:-1]).eval(), torch.randn(400, 16)
    with torch.no_grad():
        outputs = model(x)
    own = outputs.topk(2).values.diff().abs().flatten().argsort()  # the nearest to another class
    x, labels = x[own], outputs[own].argmax(1)
    test = TensorDataset(x[:200], labels[:200])
    task = l0prune.Task(TensorDataset(x[200:], labels[200:]), test=test)
    small = l0prune.export(l0prune.gate(copy.deepcopy(model), x[:2]))
    kept = {}
    for tolerance in (0.004, 0.9):
        path = tmp_path / f"{tolerance}.onnx"
        small.save_onnx(path, int8=task, time=False, fastest=False, tolerance=tolerance)
        right = OnnxFile(path.with_suffix(".int8.onnx"))(x[:200]).argmax(1) == labels[:200]
        before, error = small.int8.metrics["error"]
        assert (before, error) == (0, pytest.approx(1 - float(right.float().mean())))
        assert error <= tolerance
        kept[tolerance] = small.int8.kept
    assert kept[0.004] != kept[0.9] == ()


def _shown(dense):
    console = Console(width=300)
    with console.capture() as captured:
        console.print(dense)
    return captured.get()


NET = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
"""


@pytest.mark.slow
def test_the_command_line_writes_and_compares(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    gate = ("gate", "net.py:build", "--data", "digits", "--out", "net.gated.pt")
    assert in_process(capfd, *gate)[0] == 0
    export = ("export", "net.gated.pt", "--no-time", "--out", ".", "--tolerance", "1%")
    code, _, text = in_process(capfd, *export)
    assert code == 2
    assert "--tolerance is of the file in eight bits" in text
    code, _, text = in_process(capfd, *export, "--int8")
    assert code == 0, text
    assert (tmp_path / "net.int8.onnx").exists()
    compare = ("evaluate", "net.int8.onnx", "--against", "net.onnx", "--data", "digits", "--json")
    code, out, text = in_process(capfd, *compare)
    assert code == 0, text
    found = json.loads(out)
    assert 0 < found["output from net.onnx"] < 0.05
    assert found["output: same largest score"] > 0.9
