import json
import shutil
from inspect import signature
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import l0prune
from l0prune.cli.gate import gate as command_gate
from l0prune.cli.messages import announced
from l0prune.errors import DataError, FileError, UsageError
from l0prune.features.recipes.command import _table
from l0prune.features.recipes.files import GateSection, builtin, load
from l0prune.features.recipes.runs import run
from l0prune.plan.limits import limits
from l0prune.training.lambdas import Lambda
from l0prune.training.settings import Settings

EXAMPLES = {
    "digits": torch.zeros(2, 1, 8, 8),
    "mnist": torch.zeros(2, 1, 28, 28),
    "cifar10": torch.zeros(2, 3, 32, 32),
}
PARAMS = {
    "digits-lenet": 13_802,
    "digits-wide": 704 + 2 * 73_984 + 221_696 + 295_424 + 1_290,
    "digits-resnet": 176 + 3 * 4_672 + 13_952 + 2 * 18_560 + 330,
    "mnist-mlp": 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10,
    "mnist-mlp-sep": 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10,
    "mnist-mlp-small": 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10,
    "mnist-lenet5": 20 * 26 + 50 * 501 + 500 * 801 + 10 * 501,
    "mnist-lenet5-sep": 20 * 26 + 50 * 501 + 500 * 801 + 10 * 501,
    "mnist-lenet5-small": 20 * 26 + 50 * 501 + 500 * 801 + 10 * 501,
    "cifar-resnet": 269_722,  # He et al. 2016: 0.27 M
    "cifar-wrn": 36_479_194,  # Zagoruyko & Komodakis 2016: 36.5 M
}


def test_gates_start_alike_from_python_the_command_line_and_a_recipe():
    python, command = signature(l0prune.gate).parameters, signature(command_gate).parameters
    assert GateSection().made() == l0prune.HardConcrete()
    assert command["kind"].default == GateSection().kind
    for name in ("open_probability", "jitter", "seed"):
        assert python[name].default == command[name].default == getattr(GateSection(), name)
    for name in ("include", "exclude"):
        assert list(python[name].default) == getattr(GateSection(), name)


def test_builtin_recipes_are_these():
    elsewhere = {"crepe", "digits-exits"}  # test_crepe.py, features/exits/test_exits_recipe.py
    assert set(builtin()) - elsewhere == {*PARAMS}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each == "cifar-wrn" else ()) for each in PARAMS],
)
@pytest.mark.one_in(10)
def test_settings_of_a_builtin_recipe_fit_its_network(name):
    recipe = load(name, [])
    model = l0prune.load_model(recipe.model.source)
    l0prune.gate(
        model,
        EXAMPLES[recipe.data.source],
        include=recipe.gate.include,
        exclude=recipe.gate.exclude,
        open_probability=recipe.gate.open_probability,
    )
    gates = l0prune.gates(model)
    assert sum(p.numel() for p in model.parameters()) - gates.plan.size == PARAMS[name]
    settings = Settings.of(recipe.finetune)
    if settings.budget is None:
        assert min(Lambda.of(settings.lam, 60_000).for_axes(gates.plan.names)) > 0
    else:
        assert limits(settings.budget)
    for stage in (recipe.dense, recipe.recover):
        if stage is not None:
            Settings.of(stage)


def test_mlp_starts_at_the_papers_dropout_rates():
    recipe = load("mnist-mlp", [])
    model = l0prune.load_model(recipe.model.source)
    start = recipe.gate.open_probability
    l0prune.gate(model, EXAMPLES["mnist"], open_probability=start, jitter=0)
    gates = l0prune.gates(model)
    for axis in gates.axes:
        rate = 0.2 if axis.kind == "input" else 0.5
        log_alpha = torch.tensor((1 - rate) / rate).log()
        values = gates.log_alpha.detach()[axis.slice]
        torch.testing.assert_close(values, log_alpha.expand(axis.size), atol=2e-4, rtol=0)


@pytest.mark.slow
def test_wide_resnet_is_gated_where_it_had_dropout():
    recipe = load("cifar-wrn", [])
    model = l0prune.load_model(recipe.model.source)
    start = recipe.gate.open_probability
    l0prune.gate(model, EXAMPLES["cifar10"], include=recipe.gate.include, open_probability=start)
    axes = l0prune.gates(model).axes
    names = [f"layer{i}.{j}.conv1" for i in (1, 2, 3) for j in range(4)]
    assert {axis.name: axis.size for axis in axes} == dict(
        zip(names, [160] * 4 + [320] * 4 + [640] * 4, strict=True)
    )
    rate = 0.3
    log_alpha = l0prune.gates(model).log_alpha.detach().mean()
    torch.testing.assert_close(log_alpha, torch.tensor((1 - rate) / rate).log(), atol=2e-3, rtol=0)


@pytest.mark.slow
def test_wide_resnet_runs(tmp_path):
    """All the way on 16 images of noise; 36.5 M parameters."""
    (tmp_path / "noise.py").write_text(
        "import torch\n"
        "from l0prune.data import Data, Tensors\n"
        "from l0prune.data.preprocessing import shifted_and_mirrored\n"
        "def noise():\n"
        "    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10\n"
        "    return Data('noise', Tensors(x, y, shifted_and_mirrored), Tensors(x, y), 10)\n"
    )
    few = ["epochs=2", "settle=1", "batch_size=8", "recalibrate=1", "progress=false"]
    overrides = [f"data.source={tmp_path}/noise.py:noise", *(f"finetune.{each}" for each in few)]
    result = run(load("cifar-wrn", overrides), tmp_path / "run")
    assert result["params_before"] == PARAMS["cifar-wrn"]
    assert result["onnx_test_error"] == pytest.approx(result["test_error"], abs=1 / 16 + 1e-9)


def test_overrides():
    recipe = load("digits-lenet", ["finetune.epochs=3", "finetune.lam=2/N", "seed=7"])
    assert (recipe.finetune["epochs"], recipe.finetune["lam"], recipe.seed) == (3, "2/N", 7)
    assert load("digits-lenet", ["export.pt2=true"]).export.pt2 is True
    whole = load("digits-resnet", []).finetune
    assert whole.pop("budget")
    assert load("digits-resnet", ["finetune.budget="]).finetune == whole


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("finetune.epochs", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("gate.opn_probability=0.5", r"'opn_probability' in \[gate\]; .*'open_probability'"),
        ("gate.estimator=mean", r"'estimator' in \[gate\]"),
        ("gate.settings.estimator=mean", r"gate: .*estimator must be 'paper'"),
        ("gate.kind=sorcery", r"gate: .*continuous-sparsification"),
        ("model.source.x=1", "source is a value"),
        ("finetune.budget=", "does not say finetune.budget"),
    ],
)
def test_bad_overrides_are_refused(override, message):
    with pytest.raises(UsageError, match=message):
        load("digits-lenet", [override])


def test_the_kind_of_gate_and_its_settings():
    assert load("digits-lenet", []).gate.made() == l0prune.HardConcrete()
    recipe = load("digits-lenet", ["gate.settings.estimator=median"])
    assert recipe.gate.made() == l0prune.HardConcrete(estimator="median")
    kind = ["gate.kind=continuous-sparsification", "gate.settings.final_beta=100"]
    wanted = l0prune.ContinuousSparsification(final_beta=100)
    assert load("digits-lenet", kind).gate.made() == wanted


def test_unknown_recipe_names_the_known_ones():
    with pytest.raises(UsageError, match="digits-lenet"):
        load("digits", [])


def test_a_file_that_is_no_recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("model = [")
    with pytest.raises(FileError, match="is no TOML"):
        load(str(path), [])
    path.write_text('[model]\nsource = "m.py:f"\n')
    with pytest.raises(UsageError, match="description"):
        load(str(path), [])


def test_weights_under_a_variable_that_is_not_set(tmp_path, monkeypatch):
    monkeypatch.delenv("L0PRUNE_WEIGHTS", raising=False)
    recipe = load("digits-lenet", ["model.weights=$L0PRUNE_WEIGHTS/w.pt"])
    with pytest.raises(UsageError, match=r"L0PRUNE_WEIGHTS.*model\.weights=FILE"):
        run(recipe, tmp_path / "run")


SHORT = [
    "dense.epochs=3", "finetune.epochs=4", "finetune.gate_lr=0.5", "finetune.settle=1",
    "finetune.lam=20/N", "dense.progress=false", "finetune.progress=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a short run, what came of it, and what was said of its stages."""
    pytest.importorskip("sklearn")
    folder, said = tmp_path_factory.mktemp("done"), []
    with announced(said.append):
        result = run(load("digits-lenet", SHORT), folder)
    return folder, result, said


@pytest.fixture
def folder(done, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(done[0], tmp_path / "run", copy_function=shutil.copy2)


@pytest.mark.parametrize(
    "asked", ["finetune.budget=speed=2", "rounds=[{fit={budget='latency=0.5'}}]"]
)
def test_a_budget_in_time_is_timed_without_a_section_for_it(asked):
    recipe = load("digits-lenet", [asked])
    assert recipe.latency.threads == 1
    assert any(part.goes_by_times for part in (*recipe.rounds, recipe))


def test_only_what_could_go_by_times_is_timed():
    recipe = load("crepe", ["finetune.budget=latency=1ms", "latency.threads=1"])
    assert [part.goes_by_times for part in (*recipe.rounds, recipe)] == [False, True]
    assert not load("crepe", []).goes_by_times  # widths in sixteens
    assert load("digits-lenet", []).goes_by_times  # widths that a runtime likes


@pytest.mark.slow
def test_a_run_says_its_stages(done):
    assert done[2] == [
        "loading the data",
        "training the dense network",
        "gating the network",
        "fine-tuning with gates",
        "cutting the network, and proving it",
        "writing the ONNX file, and comparing it",
        "testing the smaller network and its file",
    ]


def test_the_number_of_the_file_is_repeated_without_l0prune(done, folder):
    datasets = pytest.importorskip("sklearn.datasets")
    session = onnxruntime.InferenceSession(folder / "digits-lenet.onnx")
    known = json.loads(session.get_modelmeta().custom_metadata_map["l0prune.preprocessing"])
    images, labels = datasets.load_digits(return_X_y=True)
    last = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[1437:].numpy()
    pixels = images[last].reshape(-1, *known["input_size"]) / known["pixel_max"]
    inputs = ((pixels - known["mean"][0]) / known["std"][0]).astype(np.float32)
    (scores,) = session.run(None, {session.get_inputs()[0].name: inputs})
    assert done[1]["onnx_test_error"] == (scores.argmax(1) != labels[last]).mean()
    report = json.loads((folder / "report.json").read_text())
    assert report["gain"]["metric"]["of_file"] == done[1]["onnx_test_error"]
    assert report["repeat"]["preprocessing"] == known


def test_the_table_of_a_run_says_how_many_times_as_fast_it_is(done, folder):
    table = _table(done[1])
    rows = dict(zip(*(column.cells for column in table.columns), strict=True))
    time = json.loads((folder / "report.json").read_text())["gain"]["time"]
    before, after = time["before"], time["after"]
    assert rows["times as fast"].startswith(f"{before / after:.3g} ({before:.3g} → {after:.3g} ms")
    assert "times as fast" not in _table({**done[1], "speedup": None}).columns[0].cells


def test_a_run_does_each_stage_once(done, folder):
    recipe, result = load("digits-lenet", SHORT), done[1]
    written = json.loads((folder / "result.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert result["params"] < result["params_before"] == 13_802
    assert result["test_error"] == pytest.approx(result["training"]["error"], abs=1 / 360 + 1e-9)
    assert result["onnx_test_error"] == pytest.approx(result["test_error"], abs=1 / 360 + 1e-9)
    stored = onnx.load(folder / Path(result["onnx"]).name).graph.initializer
    largest = max(onnx.numpy_helper.to_array(t).size for t in stored)
    assert largest <= result["params"]

    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.pt")}
    assert {path.name for path in times} == {"dense.pt", "gated.pt", "tuned.pt"}
    (folder / "gated.pt").unlink()
    (folder / "tuned.pt").unlink()
    again = run(recipe, folder)
    assert (folder / "dense.pt").stat().st_mtime_ns == times[folder / "dense.pt"]
    assert again["axes"] == result["axes"]
    assert again["test_error"] == result["test_error"]

    with pytest.raises(UsageError, match="other settings"):
        run(load("digits-lenet", []), folder)


def test_a_run_that_failed_before_its_first_stage_can_be_given_again_otherwise(tmp_path):
    with pytest.raises(FileError, match=r"nowhere\.py does not exist"):
        run(load("digits-lenet", ["model.source=nowhere.py:net"]), tmp_path)
    with pytest.raises(FileError, match=r"elsewhere\.py does not exist"):
        run(load("digits-lenet", ["model.source=elsewhere.py:net"]), tmp_path)
    (tmp_path / "dense.pt").touch()
    with pytest.raises(UsageError, match="other settings"):
        run(load("digits-lenet", ["model.source=nowhere.py:net"]), tmp_path)


@pytest.mark.slow
def test_the_small_network_learns_on_alone(done, folder):
    short = done[1]
    alone = ["recover.epochs=3", "recover.distill=0.5", "recover.progress=false"]
    (folder / "recipe.json").unlink()  # what is done so far is the same
    longer = run(load("digits-lenet", [*SHORT, *alone]), folder)
    for same in ("axes", "params", "macs", "params_before", "macs_before"):
        assert longer[same] == short[same]
    assert longer["training"]["phase"] == "dense"
    assert longer["training"]["epoch"] == 3
    assert longer["test_error"] == pytest.approx(longer["training"]["error"], abs=1 / 360 + 1e-9)
    assert longer["onnx_test_error"] == pytest.approx(longer["test_error"], abs=1 / 360 + 1e-9)
    assert longer["training"]["test_loss"] < short["training"]["test_loss"]


@pytest.mark.slow
def test_each_round_starts_from_what_the_last_one_left(tmp_path):
    pytest.importorskip("sklearn")
    folder = tmp_path / "run"
    half = "{epochs = 2, lam = 0, budget = 'params=0.5', progress = false}"
    rounds = f"rounds=[{{gate = {{exclude = ['*.in']}}, finetune = {half}}}]"
    last = ["finetune.lam=0", "finetune.budget=params=2000", "finetune.distill=0.5"]
    last += ["dense.epochs=1", "finetune.epochs=2"]
    result = run(load("digits-lenet", [*SHORT, rounds, *last]), folder)
    first = l0prune.read_info(folder / "round-1" / "tuned.pt")["history"]
    assert result["params_before"] == first["dense_params"] == PARAMS["digits-lenet"]
    assert result["training"]["dense_params"] == first["params"] <= 0.5 * first["dense_params"]
    assert result["params"] == result["training"]["params"] <= 2000
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pt")}
    again = run(load("digits-lenet", [*SHORT, rounds, *last]), folder)
    assert again == result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.pt")} == times


@pytest.mark.parametrize("stage", ["finetune", "dense", "recover"])
def test_a_setting_that_makes_no_sense_is_found_before_anything_is_trained(stage):
    with pytest.raises(UsageError, match=f"{stage}: .*epochs"):
        load("digits-lenet", [f"{stage}.epochs=abc"])


REGRESSION = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return (x, x.sum(1)), (x, x.sum(1))

def one_at_a_time():
    import l0prune
    return l0prune.Task([(torch.zeros(2, 4), torch.zeros(2))])
"""
NUMBERS = """
description = "numbers"
[model]
source = "numbers.py:net"
[data]
source = "numbers.py:data"
loss = "mse"
metric = "mae"
[dense]
epochs = 2
progress = false
[finetune]
epochs = 2
budget = "params=0.7"
progress = false
"""


@pytest.mark.slow
def test_a_recipe_names_its_loss_and_metric(tmp_path):
    (tmp_path / "numbers.py").write_text(REGRESSION)
    (tmp_path / "numbers.toml").write_text(NUMBERS)
    recipe = load(str(tmp_path / "numbers.toml"), [])
    result = run(recipe, tmp_path / "run")
    assert result["metric"] == "mae"
    assert result["test_mae"] == pytest.approx(result["onnx_test_mae"], rel=1e-4)
    assert "error" not in result["training"]
    (tmp_path / "numbers.toml").write_text(NUMBERS.replace('metric = "mae"', ""))
    recipe = load(str(tmp_path / "numbers.toml"), [])
    result = run(recipe, tmp_path / "alone")
    assert result["metric"] == "loss"
    assert result["test_loss"] == pytest.approx(result["onnx_test_loss"], rel=1e-4)
    (tmp_path / "numbers.toml").write_text(NUMBERS.replace("py:data", "py:one_at_a_time"))
    with pytest.raises(DataError, match="has no test data"):
        run(load(str(tmp_path / "numbers.toml"), []), tmp_path / "never")
    (tmp_path / "numbers.toml").write_text(NUMBERS.replace("mse", "mes"))
    with pytest.raises(UsageError, match=r"data\.loss: .*did you mean 'mse'"):
        load(str(tmp_path / "numbers.toml"), [])
