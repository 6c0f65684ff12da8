"""The benchmarks that train, on a few examples: what they compare is compared fairly."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from vision import CifarResNet

import l0prune
from benchmarks import cifar, depgraph, gpu, mnist, ways
from benchmarks.curves import seconds
from l0prune.data import Data, Tensors
from l0prune.data.preprocessing import shifted_and_mirrored
from l0prune.training.history import NAME

SHARE = 0.47
DATA = os.environ.get("L0PRUNE_DATA")
NEEDS_MODELS = "set L0PRUNE_DATA to a folder with the published checkpoints in ../models"


def network() -> nn.Module:
    """A small one of the ResNet's kind, as all ways get it."""
    torch.manual_seed(0)
    model = CifarResNet(1)
    cifar.project(model)
    return model


def noise(count: int, side: int) -> Data:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, side, side, generator=generator)
    targets = (inputs.mean((1, 2, 3)) > 0).long()
    examples = Tensors(inputs, targets, shifted_and_mirrored)
    return Data("noise", examples, examples, 10)


def job(folder: Path, epochs: int = 4, **others) -> ways.Job:
    given = {"data": noise(256, 8), "seed": 0, "device": "cpu"}
    return ways.Job(epochs=epochs, folder=folder, **given, **others)


def epochs_of(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob(NAME))


def of_ways(ways, *default):
    """A test for each way; by default only for some."""
    return pytest.mark.parametrize(
        "way", [pytest.param(w, marks=() if w in default else pytest.mark.slow) for w in ways]
    )


@of_ways(ways.ALL_WAYS, "dense")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(2)
def test_every_way_meets_the_share_in_as_many_epochs(way, tmp_path):
    if way.startswith("tp-"):
        pytest.importorskip("torch_pruning")
    model, given = network(), job(tmp_path)
    before = copy.deepcopy(model.state_dict())
    row = cifar.measure(way, model, 1.0 if way == "dense" else SHARE, given)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert epochs_of(tmp_path) == given.epochs
    assert row["seconds"] == round(seconds(tmp_path), 1)
    if way == "dense":
        assert row["macs_share"] == 1
        assert row["params"] == row["params_before"]
    else:
        assert 0.9 * SHARE < row["macs_share"] <= SHARE
        assert row["params"] < row["params_before"]


@of_ways(["dense", "l0prune-alike", "fisher", "tp-group-sl"], "dense")
@pytest.mark.filterwarnings("ignore")
def test_a_teachers_forwards_count_as_training(way, tmp_path):
    if way.startswith("tp-"):
        pytest.importorskip("torch_pruning")
    share = 1.0 if way == "dense" else SHARE
    given = job(tmp_path, training_macs=8.0, distill=0.5, teacher=network())
    row = cifar.measure(way, network(), share, given)
    # A third of a dense epoch for each, and for the last ones what is left.
    most = 8 / (share + 1 / 3)
    assert epochs_of(tmp_path) <= round(most) < round(8 / share)
    assert abs(row["training"] - 8) <= (share + 1 / 3) / 2 + 0.01
    assert (way == "dense") == (epochs_of(tmp_path) == 6)


@of_ways(["l0prune", "tp-group-sl", "taylor"], "taylor")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_way_that_is_done_is_not_done_again(way, tmp_path):
    if way.startswith("tp-"):
        pytest.importorskip("torch_pruning")
    rows = [cifar.measure(way, network(), SHARE, job(tmp_path)) for _ in range(2)]
    assert rows[0] == rows[1]


def test_macs_are_those_of_the_cost_model():
    model, example = network(), torch.zeros(2, 3, 8, 8)
    assert ways.macs(model, example) == l0prune.survey(model, (example,), own_class=False).macs


def test_a_projected_shortcut_computes_what_padding_does():
    torch.manual_seed(0)
    model = CifarResNet(2).double()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    wanted = model(x)
    cifar.project(model)
    assert [type(layer[0]).__name__ for layer in (model.layer1, model.layer2, model.layer3)] == [
        "BasicBlock", "Projected", "Projected",
    ]  # fmt: skip
    torch.testing.assert_close(model.double()(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_sparsity_learning_adds_the_regularizers_gradient():
    pytest.importorskip("torch_pruning")
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8)
    models = [network(), network()]
    grads = []
    for model in models:
        pruner = depgraph.pruner(model, x[:1], model.linear, sparse=True)
        if model is models[0]:
            groups = [{"params": list(model.parameters())}]
            optimizer = depgraph.sparse_sgd(pruner, model, 0.0)(groups)
            cross_entropy(model(x), y).backward()
            plain = model.layer1[0].conv1.weight.grad.clone()
            optimizer.step()
        else:
            cross_entropy(model(x), y).backward()
            pruner.regularize(model)
        grads.append(model.layer1[0].conv1.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert not torch.equal(grads[0], plain)


@pytest.mark.skipif(
    DATA is None or not (Path(DATA).parent / "models" / cifar.CHECKPOINTS["resnet20"]).exists(),
    reason=NEEDS_MODELS,
)
@pytest.mark.slow
def test_cifar_keeps_its_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(l0prune, "load_data", lambda name: noise(80, 32))
    options = argparse.Namespace(
        network="resnet20", ways=["dense"], macs=[0.47, 0.39], epochs=2, dense_epochs=1,
        examples=64, autocast=None, seed=[0, 1], device="cpu",
        gate_epochs=None, rate=None, distill=None,
        out=tmp_path / "cifar",
    )  # fmt: skip
    rows = cifar.run(options, options.macs, cifar.measure)
    assert [row["seed"] for row in rows] == [0, 1]  # the dense network has no budget
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert cifar.run(options, options.macs, cifar.measure) == rows
    assert capsys.readouterr().out == ""
    assert "| resnet20 | dense | 0 | 2.0 | 100.0% | 272,282 of 272,282 |" in cifar.table(rows)


def test_means_over_seeds():
    row = {"network": "vit", "budget": 0.4, "training": 2.0, "time_share": 0.4}
    rows = [row | {"way": "a", "seed": n, "error": e} for n, e in enumerate((0.1, 0.2, 0.3))]
    assert cifar.means([*rows, row | {"way": "b", "seed": 0, "error": 0.2}], "time_share") == (
        "| network | way | seeds | training, dense epochs | time_share | error |\n"
        "|---|---|---|---|---|---|\n"
        "| vit | a | 0, 1, 2 | 2.0 | 40.0% | 20.00% ± 10.00% |"
    )
    assert cifar.means(rows[:1]) == ""


def test_published_weights():
    found = [mnist.weights(p.network, p.architecture) for p in mnist.PUBLISHED if p.architecture]
    thousands = [round(count / 1000, 1) for count in found]
    assert thousands == [69.3, 76.6, 26.6, 28.6, 38.4, 6.2, 2.8]
    assert mnist.PUBLISHED[-1].params == 10_130


@pytest.mark.slow
@pytest.mark.parametrize("row", ["mlp-small", "lenet5-small"])
def test_an_mnist_row(row, tmp_path):
    (tmp_path / "noise.py").write_text(
        "import torch\n"
        "from l0prune.data import Data, Tensors\n"
        "from l0prune.data.preprocessing import shifted\n"
        "def noise():\n"
        "    generator = torch.Generator().manual_seed(0)\n"
        "    x = torch.randn(200, 1, 28, 28, generator=generator)\n"
        "    y = torch.arange(200) % 10\n"
        "    return Data('noise', Tensors(x, y, shifted), Tensors(x, y), 10)\n"
    )
    overrides = [
        f"data.source={tmp_path}/noise.py:noise", "dense.epochs=1", "finetune.epochs=10",
        "dense.progress=false", "finetune.progress=false", "recover.progress=false",
        "recover.epochs=1",
    ]  # fmt: skip
    found = mnist.measure(row, overrides, tmp_path)
    network, widths = found["network"], list(map(int, found["architecture"].split("-")))
    assert found["weights"] == mnist.weights(network, found["architecture"])
    # A bias each for what is no input, and for the ten classes.
    fed = {"mlp": widths[0], "lenet5": widths[2]}[network]
    assert found["params"] - found["weights"] == sum(widths) - fed + 10
    assert 0.9 < found["params"] / {"mlp": 15_000, "lenet5": 2700}[network] <= 1
    assert found["onnx_error"] == pytest.approx(found["error"], abs=1 / 200)
    assert mnist.measure(row, overrides, tmp_path) == found

    lines = mnist.table([found]).splitlines()
    assert len(lines) == 2 + 1 + 1 + 4
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    first = {"mlp": ["219-214-100", "69,266"], "lenet5": ["20-25-45-462", "38,410"]}[network]
    error = {"mlp": "1.40%", "lenet5": "0.90%"}[network]
    assert cells == [network, "the paper, λ = 0.1/N", *first, "", error, "", ""]


@pytest.mark.slow
def test_every_row_for_a_gpu_runs_in_its_tiny_form() -> None:
    """Somebody who has a GPU for minutes only finds it rehearsed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--minutes", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = {line["row"] for line in lines if "row" in line}
    assert rows == set(gpu.ROWS)
    assert not [line for line in lines if {"failed", "left_out"} & set(line)]


@pytest.mark.slow
def test_grail_is_the_ridge_regression_of_all_inputs_from_those_kept():
    transformers = pytest.importorskip("transformers")
    from benchmarks import language_rivals as rivals

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=12,
    )  # fmt: skip
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(40, (6, 10))
    l0prune.gate(model, (tokens[:2],), include=["*.mlp.*"], branches=False)
    layer, rows = model.model.layers[0].mlp.down_proj, []
    study = rivals.Study(model, [(tokens, None)], lambda ids, _: model(ids), [])
    with layer.register_forward_pre_hook(lambda _, given: rows.append(given[0].flatten(0, 1))):
        _, whole = study.grams, layer.weight.detach().double()
    x, kept = rows[0].detach().double(), [0, 2, 3, 7, 8]
    open_ = torch.zeros(12, dtype=torch.bool)
    open_[kept] = True
    ridge = (rivals._RIDGE * x[:, kept].square().sum(0).mean()).sqrt() * torch.eye(5)
    wanted = torch.cat([x, torch.zeros(5, 12)]), torch.cat([x[:, kept], ridge])
    back = torch.linalg.lstsq(wanted[1], wanted[0]).solution
    with study.reconstructed(open_):
        torch.testing.assert_close(
            layer.weight[:, kept].double(), whole @ back.T, atol=1e-5, rtol=1e-4
        )
    torch.testing.assert_close(layer.weight.double(), whole)
