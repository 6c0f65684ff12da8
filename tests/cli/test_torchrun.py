"""``torchrun … -m l0prune finetune`` as a user starts it, or as torchrun's own processes do."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from processes import LONGEST, launched
from torch import nn

import l0prune

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
SLOW = pytest.mark.slow


def torchrun(*arguments, cwd):
    done = subprocess.run(
        [*TORCHRUN, "-m", "l0prune", *arguments],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONGEST,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def gated(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    l0prune.gate(model, torch.zeros(2, 1, 8, 8))
    l0prune.save(model, tmp_path / "model.gated.pt", {"data": "digits"})
    return tmp_path


@pytest.mark.parametrize(
    ("distributed", "start"),
    [
        pytest.param("fsdp", launched, marks=SLOW),
        pytest.param("fsdp", torchrun, marks=SLOW),
        pytest.param("ddp", torchrun, marks=SLOW),
    ],
)
def test_two_processes_write_one_model_that_exports(gated, distributed, start):
    pytest.importorskip("sklearn")
    code, out, err = start(
        "finetune", "--epochs", "3", "--budget", "params=0.5", "--accumulate", "2",
        "--distributed", distributed, "--json", cwd=gated,
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)  # one document, by one process
    assert err.count("epoch 3/3") == 1
    assert sorted(path.name for path in gated.iterdir()) == [
        "model.gated.pt", "model.run", "model.tuned.pt",
    ]  # fmt: skip
    lines = (gated / "model.run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    tuned = l0prune.load(gated / "model.tuned.pt")
    small = l0prune.export(tuned)
    assert small.params == result["params"] <= 0.5 * result["dense_params"]
    small.save_onnx(gated / "model.onnx")
    found = l0prune.evaluate(tuned, l0prune.load_data("digits"))
    assert found["error"] == pytest.approx(result["error"])


def test_a_recipe_runs_in_one_process(command, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = command("run", "digits-lenet")
    assert code != 0
    assert "a recipe runs in one process" in err


@pytest.mark.slow
def test_what_is_wrong_is_said_once(gated):
    """By processes that have not loaded torch yet, and know of each other by the launcher alone."""
    code, out, err = torchrun("finetune", "--data", "nowhere", cwd=gated)
    assert code == 1
    assert out == ""
    assert err.count("error: 'nowhere' is no data source") == 1
