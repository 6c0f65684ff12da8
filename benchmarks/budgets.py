"""Is a budget met by the exported model, with nothing tuned? Six networks, three budgets each.

    python -m benchmarks.budgets [--networks mlp lenet5 …] [--examples 2000] [--epochs 10]

Each network is trained densely on a part of MNIST or CIFAR-10-JPEG, gated, and fine-tuned once for
each budget with ``l0prune.finetune(model, data, budget=…)``, all else by default. Printed is what
the exported model really has, as a share of the budget, and its test error before and after.
Results are JSON lines in ``runs/budgets.jsonl``.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchvision.models import DenseNet, MobileNetV2, VisionTransformer

import l0prune
from benchmarks.isolation import ROOT, append
from benchmarks.runner import Some, options
from l0prune.data import Data, Tensors
from l0prune.files.consent import RECIPES

BUDGETS = ("macs=0.5", "macs=0.3", "params=0.2")


def _recipe(name: str) -> nn.Module:
    """A network of the recipes."""
    return l0prune.load_model(f"{RECIPES / 'vision.py'}:{name}")


def _vit() -> nn.Module:
    """Four blocks of width 64 over 64 patches."""
    return VisionTransformer(32, 4, 4, 4, 64, 128, num_classes=10)


def _densenet() -> nn.Module:
    return DenseNet(growth_rate=12, block_config=(4, 4, 4), num_init_features=16, num_classes=10)


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "mlp": ("mnist", lambda: _recipe("mlp")),
    "lenet5": ("mnist", lambda: _recipe("lenet5")),
    "resnet20": ("cifar10", lambda: _recipe("resnet20")),
    "mobilenet": ("cifar10", lambda: MobileNetV2(num_classes=10, width_mult=0.5)),
    "densenet": ("cifar10", _densenet),
    "vit": ("cifar10", _vit),
}
# Epochs of dense training: so many that there is something to lose.
_DENSE = 10


def measure(
    name: str, budgets: Sequence[str], examples: int, epochs: int, seed: int
) -> Iterator[dict[str, Any]]:
    """One row for each budget."""
    source, build = NETWORKS[name]
    data = part(l0prune.load_data(source, os.environ.get("L0PRUNE_DATA")), examples)
    torch.manual_seed(seed)
    dense = build()
    found = l0prune.train_dense(dense, data, epochs=_DENSE, seed=seed, progress=False).last
    for budget in budgets:
        start = time.perf_counter()
        model = l0prune.gate(copy.deepcopy(dense), (data.train.example(2),))
        settings: dict[str, Any] = {"seed": seed, "progress": False}
        settings |= {"epochs": epochs} if epochs != 10 else {}
        last = l0prune.finetune(model, data, budget=budget, **settings).last
        exported = l0prune.export(model)
        unit, _, share = budget.partition("=")
        after, before = (getattr(exported, name) for name in (unit, f"{unit}_before"))
        yield {
            "network": name,
            "budget": budget,
            "examples": examples,
            "epochs": epochs,
            "seed": seed,
            "of_budget": round(after / before / float(share), 4),
            "dense_error": round(found["error"], 4),
            "error": round(last["error"], 4),
            "exported_error": round(l0prune.evaluate(exported.module, data)["error"], 4),
            "seconds": round(time.perf_counter() - start, 1),
        }


def part(data: Data, examples: int) -> Data:
    """The first examples for training, and as many of the test data."""
    parts = [
        replace(split, inputs=split.inputs[:examples], targets=split.targets[:examples])
        for split in (data.train, data.test)
        if isinstance(split, Tensors)
    ]
    return Data(data.name, *parts, data.classes)


def main() -> None:
    given = options(
        __doc__, networks=Some(NETWORKS), budgets=[*BUDGETS], examples=2000, epochs=10, seed=0
    )
    for name in given.networks:
        for row in measure(name, given.budgets, given.examples, given.epochs, given.seed):
            print(json.dumps(row), flush=True)
            append(ROOT / "runs" / "budgets.jsonl", row)


if __name__ == "__main__":
    main()
