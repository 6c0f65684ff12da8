"""The command line, driven as a user drives it: commands in a folder."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import onnxruntime
import pytest
import torch
from commands import run
from processes import launched
from stairs import Stairs, registered
from torch import nn

import l0prune
from l0prune.cli.project import find_recipe
from l0prune.features.latency.runtimes import RUNTIMES
from l0prune.features.recipes import files as recipe_files
from l0prune.plan import measures
from l0prune.selection import scores

NETS = __file__
GATE = ["gate", "model.pt", "--input", "1x1x8x8"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


@pytest.mark.slow
def test_a_budget_and_the_classical_way_to_it(done, refused, tmp_path):
    pytest.importorskip("sklearn")
    torch.save(network(), tmp_path / "model.pt")
    done(*GATE)
    short = ("--data", "digits", "--epochs", "4", "--json")

    assert "no augmentation of its own" in refused(2, "finetune", *short, "--augment")
    learned, _ = done("finetune", *short, "--budget", "params=0.5")
    assert 0.98 < learned["budget"]["params=0.5"]["share"] / 0.5 <= 1

    fitted, _ = done("fit", "--budget", "params=0.5", "--round-to", "4", "--json")
    assert fitted["file"] == "model.fit.pt"
    assert all(count % 4 == 0 for name, count in fitted["open"].items() if ".in" not in name)
    by_data = ("fit", "--score", "auto", "--data", "digits", "--budget", "params=0.5", "--json")
    out, _ = done(*by_data, "--out", "other.fit.pt")
    assert out["open"] != fitted["open"]
    (tmp_path / "other.fit.pt").unlink()
    out, _ = done("export", "--state", "--json")  # what was written last
    assert out["params"] == fitted["counts"]["params=0.5"]
    trained, _ = done("finetune", "model.fit.pt", *short, "--no-learn")
    assert trained["open"] == fitted["open"]
    out, _ = done("export", trained["file"], "--onnx", "--json")
    assert out["params"] == fitted["counts"]["params=0.5"]


@pytest.mark.slow
def test_gates_learn_alone_and_weights_compensate(done, refused, tmp_path):
    pytest.importorskip("sklearn")
    torch.save(network(), tmp_path / "model.pt")
    done(*GATE)
    assert "no data is named" in refused(2, "fit", "--compensate")
    asked = ("--data", "digits", "--epochs", "4", "--json")
    learned, _ = done("finetune", *asked, "--learn", "gates", "--budget", "macs=0.5")
    found, _ = done("fit", learned["file"], "--data", "digits", "--compensate", "--json")
    assert found["open"] == learned["open"]
    assert found["after"]["test_loss"] != found["before"]["test_loss"]
    out, _ = done("export", found["file"], "--onnx", "--json")
    assert out["macs"] == learned["macs"]
    divided = ("fit", "model.gated.pt", "--data", "digits", "--compensate", "--json")
    whole, _ = done(*divided, "--budget", "macs=0.5")
    assert whole["counts"]["macs=0.5"] <= 0.5 * learned["dense_macs"]


def test_a_budget_in_a_measure_of_ones_own(done, refused, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    (tmp_path / "peak.py").write_text(MEASURE)
    done(*GATE)
    budget = ("fit", "--budget", "slots=50%", "--round-to", "auto")
    assert "--measure file.py:Class" in refused(2, *budget)
    try:
        found, _ = done(*budget, "--measure", "peak.py:Slots", "--json")
        assert found["counts"] == {"slots=0.5": sum(found["open"].values())}
        assert "slots=0.5: 164 sl" in done(*budget, "--measure", "peak.py:Slots")[0]
    finally:
        measures.MEASURES.pop("slots", None)


MEASURE = """
import l0prune


class Slots(l0prune.Measure):
    name, label, suffixes = "slots", "slots", {"sl": 1.0}

    def expected(self, p, dtype=None, through=None):
        return p.sum().to(dtype)
"""

STOPPED = """
import os, signal
from pathlib import Path
import torch

metrics, pressed = Path("model.run/metrics.jsonl"), Path("pressed")

class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if metrics.exists() and metrics.read_text() and not pressed.exists():
            pressed.touch()
            os.kill(os.getpid(), signal.SIGINT)
        return torch.full((1, 8, 8), index / 40), index % 10

def data():
    return Examples(), Examples()
"""


def forked(*arguments, cwd):
    """A command in a process that has loaded torch."""
    return launched(*arguments, cwd=cwd, count=1)


@pytest.mark.slow
@pytest.mark.parametrize("start", [forked, run])
def test_a_stopped_run_goes_on(done, tmp_path, start):
    """Ctrl-C is pressed at the first example that is read after an epoch."""
    torch.save(network(), tmp_path / "model.pt")
    (tmp_path / "own.py").write_text(STOPPED)
    settings = "[finetune]\nepochs = 3\nbatch_size = 4\nema = 0.9\n"
    (tmp_path / "l0prune.toml").write_text(f'data = "own.py:data"\n{settings}')
    done("gate", "model.pt")
    code, _, err = start("finetune", "--data", "own.py:data", cwd=tmp_path)
    assert code == 130
    assert "same command" in err
    assert "Traceback" not in err
    assert not (tmp_path / "model.tuned.pt").exists()
    metrics = tmp_path / "model.run" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == 1

    _, err = done("finetune")
    assert "resuming in epoch 2" in err
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert (tmp_path / "model.tuned.pt").exists()


@pytest.mark.slow
def test_survey_as_json_and_for_people(done, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    found, _ = done("survey", "model.pt", "--input", "1x1x8x8", "--json")
    assert found["params"] == sum(p.numel() for p in network().parameters())
    assert {axis["size"] for axis in found["axes"]} == {8, 32, 288}
    out, _ = done("survey", "model.pt", "--input", "1x1x8x8")
    assert "Can be cut" in out


def test_recipes(done):
    out, _ = done("recipes", "ls", "--json")
    assert "digits-lenet" in out
    out, _ = done("recipes", "show", "digits-lenet")
    assert out == find_recipe("digits-lenet").read_text(encoding="utf-8")


def test_a_copy_of_a_builtin_recipe_finds_its_code_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, theirs in recipe_files.builtin().items():
        (tmp_path / "my.toml").write_bytes(find_recipe(name).read_bytes())
        mine = recipe_files.load("my.toml", [])
        assert (mine.name, mine.description) == ("my", theirs.description)
        assert (mine.model, mine.data, mine.report) == (theirs.model, theirs.data, theirs.report)
    source, _, factory = mine.model.source.rpartition(":")
    own = (tmp_path / Path(source).name).resolve()
    own.touch()  # one's own comes first
    assert recipe_files.load("my.toml", []).model.source == f"{own}:{factory}"


@pytest.mark.parametrize(
    ("name", "choices"), [("measure", tuple(RUNTIMES)), ("fit", (*scores.names(), "gates", "auto"))]
)
def test_help_names_all_there_is_to_choose_from(done, name, choices):
    """The help is written by hand, since it is to come without loading torch."""
    out, _ = done(name, "--help-all")
    words = re.sub(r"[^a-z0-9-]+", " ", out).replace("- ", "-")  # a line may end at a hyphen
    assert set(choices) <= set(words.split())


def test_help_shows_the_main_job_a_line_each(done):
    out, _ = done("--help")
    commands = [line.split()[1] for line in out.splitlines() if line.startswith("      l0prune ")]
    assert commands == ["gate", "finetune", "export"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["survey", "torchvision:nothing"], "torchvision has no model"),
        (
            ["gate", NETS, "--input", "1x8"],
            f"is code. Name what makes the model in it, a function, a class or a module: {NETS}:",
        ),
        (["survey", "model.pt", "--input", "1xx8"], "is no input"),
        (["gate", "model.pt", "--input", "1x1x8x8", "--open-probability", "1"], "strictly between"),
        (
            ["gate", "model.pt", "--input", "1x1x8x8", "--jitter", "-1"],
            "jitter must be a number from 0 to",
        ),
        ([*GATE, "--set", "estimator=mean"], "estimator must be"),
        ([*GATE, "--set", "estimator"], "is not KEY=VALUE"),
        ([*GATE, "--set", "softness=3"], "softness"),
        ([*GATE, "--gate", "sorcery"], "hard-concrete"),
        (["finetune"], "no file is named"),
        (["export"], "no file is named"),
        (["fit"], "no file is named"),
        (["run", "nothing"], "there is no recipe"),
        (["run", "digits-lenet", "dense"], "is not KEY=VALUE"),
        (["nonsense"], "No such command"),
        (["export", "--nonsense"], "No such option"),
    ],
)
def test_wrong_use_is_exit_code_2(refused, tmp_path, arguments, message):
    torch.save(network(), tmp_path / "model.pt")
    assert message in refused(2, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_no_model_at_all(refused):
    assert "no model is named" in refused(2, "survey")


def save_text(path):
    path.write_text("no model")


def save_state(path):
    torch.save(network().state_dict(), path)


def save_half(path):
    torch.save(network(), path)
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, "does not exist"),
        (save_text, "m.pt"),
        (save_state, "--weights"),
        (save_half, "m.pt"),
    ],
)
def test_a_file_that_cannot_be_used_is_exit_code_1(refused, tmp_path, make, message):
    if make is not None:
        make(tmp_path / "m.pt")
    assert message in refused(1, "gate", "m.pt", "--input", "1x1x8x8")
    assert not list(tmp_path.glob("*.gated.pt"))


def test_a_file_that_is_missing_is_said_before_anything_is_asked_for(refused):
    assert "nothere.pt does not exist" in refused(1, "fit", "nothere.pt")


def test_another_kind_of_gate(done, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    kind = ("--gate", "continuous-sparsification", "--set", "final_beta=100")
    out, _ = done(*GATE, *kind, "--json")
    gate = l0prune.gates(l0prune.load(tmp_path / "model.gated.pt")).gate
    assert gate == l0prune.ContinuousSparsification(final_beta=100)
    assert out["kind"] == {"name": gate.name, **asdict(gate)}


def test_a_model_that_cannot_be_pruned_says_so(refused, tmp_path):
    torch.save(nn.Sequential(nn.Linear(4, 3)), tmp_path / "m.pt")
    assert "no axis is left" in refused(1, "gate", "m.pt", "--input", "2x4", "--exclude", "*")


@pytest.mark.slow
def test_a_budget_that_cannot_be_met(done, refused, tmp_path):
    pytest.importorskip("sklearn")
    torch.save(network(), tmp_path / "model.pt")
    done(*GATE)
    for arguments in (["fit"], ["finetune", "--data", "digits"]):
        said = refused(2, *arguments, "--budget", "params=0.0001")
        assert "cannot be met" in said
        assert "feeds the model's output" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--faster", "0.5"], "no faster than the one that came in"),
        (["--faster", "2", "--budget", "latency=1ms"], "leave out the other one"),
        (["--budget", "params=0.0001"], "cannot be met"),
        (["--budget", "params=0.0001", "--score", "fisher"], "cannot be met"),
        (["--budget", "params=0.5", "--kind", "head"], "is of the kind 'head'"),
    ],
)
@pytest.mark.one_in(2)
def test_what_no_fit_can_do_is_said_before_data_is_read(done, refused, tmp_path, options, message):
    torch.save(network(), tmp_path / "model.pt")
    done(*GATE)
    (tmp_path / "fails.py").write_text("def load():\n    raise SystemExit('data was read')\n")
    assert message in refused(2, "fit", "--data", "fails.py:load", *options)


def test_where_results_go_is_looked_at_before_training(done, refused, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    done(*GATE)
    (tmp_path / "taken").write_text("")
    short = ["finetune", "--data", "digits", "--epochs", "99999"]
    for given, message in (
        (["--out", "missing/x.pt"], "missing/x.pt was not written"),
        (["--run", "taken"], "the folder taken cannot be made"),
    ):
        assert message in refused(1, *short, *given)
    assert not (tmp_path / "model.run").exists()


@pytest.mark.parametrize("lam", ["-1/N", "0.1/M", "nothing=1"])
@pytest.mark.one_in(3)
def test_a_lambda_that_makes_no_sense(done, refused, tmp_path, lam):
    pytest.importorskip("sklearn")
    torch.save(network(), tmp_path / "m.pt")
    done("gate", "m.pt", "--input", "1x1x8x8", "--data", "digits")
    assert "λ" in refused(2, "finetune", "--lambda", lam)
    assert not (tmp_path / "m.tuned.pt").exists()


KEYWORDS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, *, left, right):
        return self.last(self.first(left - right).relu())

def data():
    examples = [({"left": torch.ones(4) * n, "right": torch.ones(4)}, n % 2) for n in range(8)]
    return examples, examples
"""


def test_data_in_dicts_are_a_models_keyword_inputs(done, tmp_path):
    (tmp_path / "two.py").write_text(KEYWORDS)
    given = ("--data", "two.py:data")
    done("gate", "two.py:Two", *given)
    done("finetune", *given, "--epochs", "2", "--batch-size", "4")


PRICES = """
import torch
from torch import nn
import l0prune

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return (x, x.sum(1)), (x, x.sum(1))

def far(outputs, targets):
    return float((outputs[:, 0] - targets).abs().max())

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.first, self.last = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        x = (self.embedding(input_ids) * attention_mask[..., None]).mean(1)
        logits = self.last(self.first(x).relu())
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"logits": logits, "loss": loss}

def task():
    ids = torch.arange(32).view(8, 4) % 9
    batches = [{"input_ids": ids, "attention_mask": ids > 0, "labels": torch.arange(8) % 2}] * 2
    return l0prune.Task(batches, batches, metric=lambda y, t: y["logits"].argmax(1).ne(t).float())
"""


def test_loss_and_metric_by_name_and_of_a_file(done, refused, tmp_path):
    (tmp_path / "prices.py").write_text(PRICES)
    given = ("--data", "prices.py:data")
    done("gate", "prices.py:net", *given)
    short = (*given, "--epochs", "2", "--json")
    said = refused(2, "finetune", *short)
    assert "(32,) of float32: one number for an example is no choice between classes" in said
    assert "did you mean 'mse'" in refused(2, "finetune", *short, "--loss", "mes")
    assert not (tmp_path / "prices-net.run").exists()
    alone, err = done("finetune", *short, "--loss", "mse")
    assert alone["test_loss"] > 0
    assert "error" not in alone
    assert f"test loss {alone['test_loss']:.4g}" in err
    out, _ = done("finetune", *short, "--loss", "l1", "--metric", "prices.py:far", "--run", "other")
    assert out["far"] >= out["test_loss"]
    by_score = (*given, "--loss", "mse", "--score", "taylor", "--budget", "macs=0.5")
    fitted, _ = done("fit", *by_score, "--metric", "prices.py:far", "--json")
    for when, file in (("before", "prices-net.gated.pt"), ("after", "prices-net.fit.pt")):
        asked = (*given, "--loss", "mse", "--metric", "prices.py:far", "--json")
        tested, _ = done("evaluate", file, *asked)
        assert fitted[when] == {name: tested[name] for name in ("examples", "test_loss", "far")}
    out, _ = done("fit", *by_score)
    now, after = (f"{fitted[when]['test_loss']:.4g}" for when in ("before", "after"))
    assert f"on 32 test examples: test loss {now} before, test loss {after} after" in out


def test_a_function_may_return_a_task_and_inputs_have_names(done, tmp_path):
    (tmp_path / "prices.py").write_text(PRICES)
    named = ("--input", "input_ids=1x4:int64,attention_mask=1x4:bool")
    by_hand, _ = done("survey", "prices.py:Words", *named, "--json")
    given = ("--data", "prices.py:task")
    out, _ = done("survey", "prices.py:Words", *given, "--json")
    assert out == by_hand
    assert by_hand["gates"] > 0
    done("gate", "prices.py:Words", *named)
    out, _ = done("finetune", *given, "--epochs", "2", "--json")
    assert {"metric", "test_loss"} < out.keys()


@pytest.mark.slow
def test_a_size_that_stays_free(done, tmp_path):
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)
    torch.save(nn.Sequential(*layers), tmp_path / "model.pt")
    sizes = ("--dynamic", "input:2=height", "--dynamic", "input:3=width", "--keep-class", "native")
    done("gate", "model.pt", "--input", "2x1x8x8", *sizes)
    done("export", "--onnx", "--json")
    (given,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").get_inputs()
    assert given.shape == ["batch", 1, "height", "width"]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("input=height", "--dynamic takes input:dim=name, like input_ids:1=seq"),
        ("image:2=height", "names 'image', which is no input of the example; there are input"),
    ],
)
def test_a_size_that_cannot_be_free(refused, tmp_path, asked, text):
    torch.save(nn.Sequential(nn.Conv2d(1, 2, 3)), tmp_path / "model.pt")
    assert text in refused(2, "gate", "model.pt", "--input", "2x1x8x8", "--dynamic", asked)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.slow
def test_a_network_by_name_says_its_outputs_and_that_its_weights_are_random(done):
    name = "torchvision:shufflenet_v2_x0_5"
    _, err = done("survey", name, "--input", "1x3x64x64", "--json")
    assert f"{name}: its last layer, fc, has 1,000 outputs; its weights are random, not" in err


def test_a_budget_that_is_missed_is_said_once(done, tmp_path, monkeypatch):
    torch.save(network(), tmp_path / "model.pt")
    done(*GATE)
    monkeypatch.setattr(Stairs, "factor", 1.0)
    monkeypatch.setattr(Stairs, "overhead", 1e9)  # of what is observed: no choice can do
    with registered(Stairs):
        out, err = done("fit", "--budget", "stairs=0.5", "--json")
    assert out["counts"]["stairs=0.5"] > 1e9
    said = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert [line[:43] for line in said] == ["warning: the budget stairs=0.5 is not met: "]
