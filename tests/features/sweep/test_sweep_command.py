"""``l0prune sweep``: with runs that are made up, and as processes."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import COMMAND, ENVIRONMENT, run

import l0prune
from l0prune.errors import UsageError
from l0prune.features.recipes.files import load
from l0prune.features.sweep import launchers
from l0prune.features.sweep.grid import asked, points
from l0prune.features.sweep.runs import result_of
from l0prune.files.atomic import is_claimed

CODE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return (x, x.sum(1)), (x, x.sum(1))
"""
RECIPE = """
description = "sums"
[model]
source = "sums.py:net"
[data]
source = "sums.py:data"
loss = "mse"
metric = "mae"
[dense]
epochs = 2
[finetune]
epochs = 2
budget = "params=0.7"
"""
TWICE = ("sweep", "sums.toml", "--budget", "params=0.5,0.7", "--seed", "0,1", "--out", "out")
NAMES = [f"params-{share}_seed-{seed}" for share in ("0.5", "0.7") for seed in (0, 1)]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "sums.py").write_text(CODE)
    (tmp_path / "sums.toml").write_text(RECIPE)
    return tmp_path / "sums.toml"


def test_budgets_and_seeds_are_settings_of_the_recipe():
    lenet, crepe = load("digits-lenet", []), load("crepe", [])
    found = asked(lenet, "macs=0.3,0.5, params=10k", "0,1", ['finetune.lr=1e-3,"1e-2"'])
    assert found == {
        "finetune.budget": ["macs=0.3", "macs=0.5", "params=10k"],
        "finetune.lr": ["1e-3", '"1e-2"'],
        "seed": ["0", "1"],
    }
    assert [*asked(crepe.model_copy(update={"fit": crepe.rounds[0].fit}), "macs=1", None, [])] == [
        "fit.budget"
    ]
    both = asked(lenet, None, None, ['finetune.budget="macs=0.5, params=0.3","macs=0.3"'])
    assert both == {"finetune.budget": ['"macs=0.5, params=0.3"', '"macs=0.3"']}
    listed = asked(lenet, None, None, ["gate.exclude=['a', 'b'],[]"])
    assert listed == {"gate.exclude": ["['a', 'b']", "[]"]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, None, []), "needs settings of several values"),
        ((None, "0,0", []), "a value twice"),
        ((None, "0", ["seed=1"]), "a value twice"),
        ((None, None, ["finetune.lr="]), "is not KEY=VALUE"),
        ((None, None, ["=3"]), "is not KEY=VALUE"),
    ],
)
def test_settings_that_sweep_nothing_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        asked(load("digits-lenet", []), *given)


def test_each_combination_is_a_run_with_a_folder_of_its_own():
    found = points("digits-lenet", [], {"finetune.lr": ["1e-3", "1e-2"], "seed": ["0", "1"]})
    assert [(each.recipe.finetune["lr"], each.recipe.seed) for each in found] == [
        (1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1),
    ]  # fmt: skip
    assert [each.name for each in found] == [
        f"lr-{lr}_seed-{seed}" for lr in ("1e-3", "1e-2") for seed in (0, 1)
    ]
    assert [found[0].dense == each.dense for each in found] == [True, False, True, False]
    alike = points("digits-lenet", [], {"gate.exclude": ['["a*"]', '["*a"]']})
    assert len({each.name for each in alike}) == 2
    with pytest.raises(UsageError, match=r"finetune: .*epochs"):
        points("digits-lenet", [], {"finetune.epochs": ["3", "never"]})


class MadeUp:
    """A launcher whose runs write results at their third look, or end as they are told to."""

    name = "made-up"
    jobs = 2
    endings = {}  # noqa: RUF012
    begun, most = [], 0

    def __init__(self, folder, jobs, options):
        self.jobs, self.open, self.options = jobs or MadeUp.jobs, [], options

    def start(self, command):
        folder = Path(command.words[command.words.index("--out") + 1])
        job = MadeUpJob(folder, self, (folder / "dense.pt").exists(), command.log)
        self.open.append(job)
        MadeUp.begun.append((folder.name, job.had_dense))
        MadeUp.most = max(MadeUp.most, len(self.open))
        return job


class MadeUpJob:
    def __init__(self, folder, launcher, had_dense, log):
        self.folder, self.launcher, self.had_dense, self.log = folder, launcher, had_dense, log
        self.looks = 0

    def poll(self):
        self.looks += 1
        (self.folder / "dense").mkdir(exist_ok=True)
        if not self.had_dense and self.looks == 2:
            (self.folder / "dense.pt").write_bytes(b"dense")
        if self.looks < 3:
            return None
        self.launcher.open.remove(self)
        ending = MadeUp.endings.get(self.folder.name, 0)
        if ending == 0:
            share, seed = map(float, self.folder.name.removeprefix("params-").split("_seed-"))
            (self.folder / "result.json").write_text(json.dumps(result(share, seed)))
        elif ending == 1:
            Path(self.log).write_text("loading\nerror: the data are gone:\n  all of them\n")
        return ending


def result(share, seed):
    numbers = {"params": 100 * share, "params_before": 100, "macs": 80 * share, "macs_before": 80}
    files = {"onnx": "sums.onnx", "certificate": [], "recipe": "sums"}
    return {"metric": "mae", "test_mae": 1 - share + seed / 10, **numbers, **files}


@pytest.fixture
def made_up(recipe, monkeypatch):
    monkeypatch.setitem(launchers.LAUNCHERS, "made-up", MadeUp)
    monkeypatch.setattr("l0prune.features.sweep.runs._PAUSE", 0)
    for name, value in {"endings": {}, "begun": [], "most": 0}.items():
        monkeypatch.setattr(MadeUp, name, value)
    return (*TWICE, "--on", "made-up")


def test_all_runs_are_made_some_at_a_time_and_compared_over_seeds(made_up, done, tmp_path):
    out, err = done(*made_up, "--json")
    assert [run["name"] for run in out["runs"]] == NAMES
    assert MadeUp.most == 2
    assert [row["settings"] for row in out["table"]] == [
        {"finetune.budget": "params=0.5"}, {"finetune.budget": "params=0.7"},
    ]  # fmt: skip
    row = out["table"][0]
    assert (row["runs"], row["done"], row["params_before"], row["ms"]) == (2, 2, 100, None)
    assert row["value"] == pytest.approx({"mean": 0.55, "low": 0.5, "high": 0.6})
    assert row["macs"] == {"mean": 40, "low": 40, "high": 40}
    assert "(4 of 4)" in err
    page = l0prune.Report.load(tmp_path / "out/report.json").content
    assert [each.name for each in page.runs] == NAMES
    assert out["page"] == "out/report.html"
    text, err = done(*made_up)
    assert len(MadeUp.begun) == 4  # what is done is not done again
    assert err.count("done before") == 4
    assert "0.55 (0.5 to 0.6)" in " ".join(text.split())


def test_the_dense_network_is_trained_once_a_seed(made_up, done, tmp_path):
    done(*made_up, "--jobs", "4")
    trained = [name for name, had_dense in MadeUp.begun if not had_dense]
    assert trained == [NAMES[0], NAMES[1]]
    assert {(tmp_path / "out" / name / "dense.pt").read_bytes() for name in NAMES} == {b"dense"}


def test_what_fails_or_is_lost_is_said_and_stops_nothing_else(made_up, command, done, tmp_path):
    MadeUp.endings |= {NAMES[0]: 1, NAMES[3]: "its process was ended by SIGKILL"}
    code, out, err = command(*made_up, "--json")
    found = json.loads(out)
    assert code == 1
    assert [run["state"] for run in found["runs"]] == ["failed", "done", "done", "lost"]
    assert f"{NAMES[0]} failed: the data are gone: all of them" in err
    assert f"{NAMES[3]} lost: its process was ended by SIGKILL" in err
    assert [(row["done"], row["runs"]) for row in found["table"]] == [(1, 2), (1, 2)]
    page = l0prune.Report.load(tmp_path / "out/report.json").content
    assert [each.name for each in page.runs] == [NAMES[1], NAMES[2]]
    MadeUp.begun.clear()
    MadeUp.endings.clear()
    done(*made_up)
    assert [name for name, _ in MadeUp.begun] == [NAMES[0], NAMES[3]]


def test_a_result_without_its_exits_is_not_done(recipe, tmp_path):
    pytest.importorskip("l0prune.features.exits")
    recipe.write_text(RECIPE + "[exits]\ntolerance = '1%'\n")
    (tmp_path / "out" / NAMES[0]).mkdir(parents=True)
    (tmp_path / "out" / NAMES[0] / "result.json").write_text(json.dumps(result(0.5, 0)))
    (point, *_) = points(str(recipe), [], {"finetune.budget": ["params=0.5"], "seed": ["0"]})
    assert result_of(tmp_path / "out", point) is None
    (tmp_path / "out" / NAMES[0] / "result.json").write_text(
        json.dumps({**result(0.5, 0), "exits": {}})
    )
    assert result_of(tmp_path / "out", point) is not None


def test_a_folder_of_something_else_is_refused_with_what_differs(made_up, done, refused, tmp_path):
    done(*made_up)
    said = refused(2, *made_up, "finetune.epochs=3")
    assert "out holds another sweep: its finetune.epochs is 2, not 3" in said
    fewer = ("sweep", "sums.toml", "--seed", "0,1", "--on", "made-up", "--out", "out")
    assert "it has finetune.budget=params=0.5,params=0.7, too" in refused(2, *fewer)
    other = (*made_up, "--set", "finetune.lr=1e-3,1e-2")
    assert "it has no finetune.lr" in refused(2, *other)
    MadeUp.begun.clear()
    done(*("0,1,2" if each == "0,1" else each for each in made_up))  # more is no other sweep
    assert [name for name, _ in MadeUp.begun] == ["params-0.5_seed-2", "params-0.7_seed-2"]
    (tmp_path / "out/sweep.json").write_text("[]")
    assert "sweep.json is damaged" in refused(2, *made_up)
    (tmp_path / "out/sweep.json").unlink()
    assert "out holds no sweep but" in refused(2, *made_up)


def test_wrong_use_is_said_before_anything_runs(made_up, refused, tmp_path):
    assert "there is no launcher 'moon'" in refused(2, *TWICE, "--on", "moon")
    assert "'gpu' is not KEY=VALUE" in refused(2, *made_up, "--job", "gpu")
    assert "processes of this machine have no parameters" in refused(2, *TWICE, "--job", "a=1")
    assert "more than the" in refused(2, *TWICE, "--jobs", "1000")
    assert MadeUp.begun == []


@pytest.mark.slow
def test_a_sweep_of_processes_is_stopped_and_goes_on_and_is_one_run_each(recipe, tmp_path):
    process = subprocess.Popen(
        [*COMMAND, *TWICE, "--jobs", "2"], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (tmp_path / "out" / NAMES[1] / "dense.pt").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "stopped. The same command goes on" in err
    code, out, err = run(*TWICE, "--jobs", "2", "--json", cwd=tmp_path)
    assert code == 0, err
    found = json.loads(out)
    assert [each["state"] for each in found["runs"]] == ["done"] * 4
    assert all(each["ms"] > 0 for each in found["runs"])
    trained = [(tmp_path / "out" / name / "dense/checkpoint.pt").exists() for name in NAMES]
    assert sum(trained) == 2
    # As one run with these settings, and no shared network, has it.
    alone = ("run", "sums.toml", "finetune.budget=params=0.7", "seed=1", "--out", "alone")
    assert run(*alone, cwd=tmp_path)[0] == 0
    results = [
        json.loads((tmp_path / folder / "result.json").read_text())
        for folder in (f"out/{NAMES[3]}", "alone")
    ]
    assert results[0]["test_mae"] == results[1]["test_mae"]
    assert results[0]["axes"] == results[1]["axes"]
    for name in NAMES:
        assert re.search("the report is", (tmp_path / f"out/logs/{name}.txt").read_text())


@pytest.mark.slow
def test_a_sweep_whose_launcher_was_killed_goes_on_from_its_folder(recipe, tmp_path):
    code = recipe.with_name("sums.py")
    waits = "while not os.path.exists('go'):\n        time.sleep(0.05)\n    "
    code.write_text(
        "import os, time\n" + CODE.replace("    return nn.S", f"    {waits}return nn.S")
    )
    sweep = ("sweep", "sums.toml", "--seed", "0,1", "--out", "out", "--jobs", "2", "--json")
    process = subprocess.Popen(
        [*COMMAND, *sweep], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    locks = [tmp_path / f"out/seed-{seed}" for seed in (0, 1)]
    while not all(is_claimed(lock) for lock in locks):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()  # its runs, in sessions of their own, go on
    process.wait()
    again = subprocess.Popen(
        [*COMMAND, *sweep], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(5)  # the second launcher finds the runs of the first
    assert again.poll() is None
    (tmp_path / "go").touch()
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert [each["state"] for each in json.loads(out)["runs"]] == ["done", "done"]
    for seed in (0, 1):  # each was run once
        assert (tmp_path / f"out/logs/seed-{seed}.txt").read_text().count("the report is") == 1


@pytest.mark.slow
def test_a_killed_run_is_lost_and_the_others_are_done(recipe, tmp_path):
    code = recipe.with_name("sums.py")
    seeds = ("sweep", "sums.toml", "--seed", "0,1,2", "--out", "out", "--jobs", "1", "--json")
    code.write_text(
        "import os, sys\n"
        + CODE.replace(
            "def net():\n",
            "def net():\n    if 'seed=1' in sys.argv:\n        os.kill(os.getpid(), 9)\n",
        )
    )
    exit_code, out, err = run(*seeds, cwd=tmp_path)
    assert exit_code == 1
    assert [each["state"] for each in json.loads(out)["runs"]] == ["done", "lost", "done"]
    assert "seed-1 lost: its process was ended by SIGKILL, which usually means" in err
    assert os.path.exists(tmp_path / "out/report.html")


def test_a_sweep_is_not_for_torchrun(refused, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "leave torchrun out" in refused(2, "sweep", "digits-lenet", "--seed", "0,1")
