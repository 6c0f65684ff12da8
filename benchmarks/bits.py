"""Bits that are learned, beside Bayesian Bits: LeNet-5 on MNIST, VGG-7 on CIFAR-10 (JPEG).

    python -m benchmarks.bits [--budgets 0.003 0.01] [--dense 5] [--epochs 30] [--seeds 0]
    python -m benchmarks.bits --network vgg7 --budgets 0.005 [--maps 32] [--examples 2000] …

A dense LeNet-5 (20-50-800-500), or a VGG-7 (two convolutions each of 128, 256 and 512 maps, a
Linear of 1,024), is trained for some epochs, then gated, and slots and bits learn together under a
budget in BOPs (menu 0, 2, 4, 8, 16), for as many epochs as are given. Images of CIFAR-10 are
shifted and mirrored, those of MNIST not. Errors are on the test images (10,000, or as many as
``--examples``): of the dense network in float32, of the gated one as it is quantized, and of its
file in ONNX Runtime (on ``--in-file`` of them). Bits are those of the weights over those of the
inputs of the layers. ``--maps 32`` is a VGG-7 of a quarter of all widths. The data are in
L0PRUNE_DATA.

Published (van Baalen et al. 2020, table 1): 99.30 % accuracy at 0.36 % of the BOPs for LeNet-5,
93.23 % at 0.51 % for VGG-7 (on CIFAR-10 itself).
"""

from __future__ import annotations

import copy
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.budgets import part
from benchmarks.eight_bits import error_of
from benchmarks.runner import One, options, table
from l0prune.plan.measures import measure_of
from l0prune.running.task import Task
from recipes.vision import lenet5

BATCH = 100
DATA = {"lenet5": "mnist", "vgg7": "cifar10"}


def vgg7(maps: int = 128) -> nn.Module:
    """VGG-7 for CIFAR-10 as Bayesian Bits has it, with BatchNorm."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (maps, 2 * maps, 4 * maps):
        for _ in range(2):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(16 * inputs, 8 * maps), nn.ReLU(), nn.Linear(8 * maps, 10)]
    return nn.Sequential(*layers)


def learned(model: nn.Module, task: Task, budget: float, settings: dict[str, Any]) -> Any:
    """Learn slots and bits of a dense network; return the gated one and the last record."""
    gated = l0prune.gate(copy.deepcopy(model), task.train.example(2), seed=settings["seed"])
    budget_in_bops = f"bops={budget}"
    history = l0prune.finetune(gated, task, quantize="bits", budget=budget_in_bops, **settings)
    return gated.to("cpu").eval(), history.last


def row(
    gated: nn.Module, task: Task, last: dict[str, Any], dense: float, tested: int
) -> tuple[str, ...]:
    """Export a network, and return its row of the table, with its file on some test images."""
    gates = l0prune.gates(gated)
    bops = measure_of(gates.plan, "bops")
    small = l0prune.export(gated)
    images = next(iter(task.test.batches(100)))[0]
    with tempfile.TemporaryDirectory() as folder:
        small.save_onnx(Path(folder) / "model.onnx", int8=images, time=False)
        in_file = error_of(Path(folder) / "model.int8.onnx", task, tested // BATCH)
    open_ = gates.open().cpu()
    widths = "-".join(str(int(axis.open.sum())) for axis in gates.axes if axis.kind != "bits")
    bits = ", ".join(f"{w}/{x}" for w, x in small.ranges.by_layer.values())
    errors = (f"{error:.2%}" for error in (dense, last["error"], in_file))
    return f"{bops.actual(open_) / bops.dense():.3%}", *errors, widths, bits


def rows(given: Namespace) -> Iterator[tuple[str, ...]]:
    """Yield a row for each budget and seed."""
    data = l0prune.load_data(DATA[given.network], os.environ.get("L0PRUNE_DATA"))
    task = Task.of(data if given.examples is None else part(data, given.examples))
    for seed in given.seeds:
        torch.manual_seed(seed)
        model = lenet5() if given.network == "lenet5" else vgg7(given.maps)
        settings: dict[str, Any] = {"batch_size": BATCH, "seed": seed, "report": False}
        settings["augment"] = given.network == "vgg7"
        dense = l0prune.train_dense(model, task, epochs=given.dense, **settings).last["error"]
        settings["epochs"] = given.epochs
        for budget in given.budgets:
            gated, last = learned(model, task, budget, settings)
            yield row(gated, task, last, dense, given.in_file)


def main() -> None:
    given = options(
        __doc__, threads=None, network=One(DATA), budgets=[0.003], epochs=30, seeds=[0],
        dense=(5, "epochs of the dense training"), in_file=(10_000, "test images of a file"),
        maps=(128, "of the first layer of vgg7"), examples=(int, "of the data; default all"),
    )  # fmt: skip
    head = "BOPs | dense, error | error | error of the file | slots | bits, weights/inputs"
    table(head, rows(given))


if __name__ == "__main__":
    main()
