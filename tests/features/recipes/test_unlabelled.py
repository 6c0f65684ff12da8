"""A recipe without labels: own answers, a round that is cut in one shot, a report of its own."""

import pytest
import torch
from onnxruntime import InferenceSession

import l0prune
from l0prune.errors import DataError, UsageError
from l0prune.features.recipes.files import load
from l0prune.features.recipes.runs import run

CODE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 24), nn.Linear(24, 12)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(12, 2))

def data():
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    nothing = torch.full((60,), torch.nan)
    return (x[:60], nothing), (x[60:], nothing)

def batches():
    return list(data()[0][0].split(12))

def report(dense, file):
    params = sum(each.numel() for each in dense.parameters())
    return {"bytes": file.stat().st_size, "params of the dense": params}

def nothing(dense, file):
    return None
"""
RECIPE = """
description = "own answers"
report = "own.py:report"
[model]
source = "own.py:net"
[data]
source = "own.py:data"
loss = "mse"
answers = true
[[rounds]]
gate = { exclude = ["*.in"] }
fit = { budget = "params=0.6", score = "outputs", round_to = 4 }
[finetune]
budget = "params=200"
epochs = 3
progress = false
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "own.toml").write_text(RECIPE)
    return str(tmp_path / "own.toml")


@pytest.mark.slow
def test_a_run_learns_own_answers_in_a_network_cut_in_one_shot(recipe, tmp_path):
    folder = tmp_path / "run"
    result = run(load(recipe, []), folder)
    dense = l0prune.load_model(f"{tmp_path}/own.py:net")
    assert result["params_before"] == sum(p.numel() for p in dense.parameters()) == 446
    fitted = l0prune.load(folder / "round-1" / "tuned.pt", dense)
    widths = [int(axis.open.sum()) for axis in l0prune.gates(fitted).axes]
    assert all(width % 4 == 0 for width in widths)
    assert result["training"]["dense_params"] <= 0.6 * 446
    assert result["params"] <= 200
    dense = l0prune.load_model(f"{tmp_path}/own.py:net").eval()
    x = l0prune.load_data(f"{tmp_path}/own.py:data").test.inputs
    (small,) = InferenceSession(folder / "own.onnx").run(None, {"input": x.numpy()})
    error = (torch.from_numpy(small) - dense(x)).square().mean().item()
    assert result["onnx_test_loss"] == pytest.approx(error, rel=1e-4)
    assert result["test_loss"] == pytest.approx(error, rel=1e-4)
    size = (folder / "own.onnx").stat().st_size
    assert result["report"] == {"bytes": size, "params of the dense": 446}


def test_a_round_is_fitted_or_learns(recipe):
    with pytest.raises(UsageError, match="either fit or finetune"):
        load(recipe, ["fit={budget='macs=0.5'}"])


@pytest.mark.slow
def test_a_report_is_a_dict(recipe, tmp_path):
    (tmp_path / "own.toml").write_text(
        RECIPE.replace("report", "nothing").replace("nothing =", "report =")
    )
    with pytest.raises(UsageError, match=r"must return a dict .*not a NoneType"):
        run(load(recipe, []), tmp_path / "run")


def test_batches_of_inputs_are_refused(recipe, tmp_path):
    with pytest.raises(DataError, match="not a list of batches"):
        run(load(recipe, ["data.source=own.py:batches"]), tmp_path / "run")
