"""CIFAR-10 ResNets cut without labels and gradients, beside what else does without training.

    python -m benchmarks.shrink --network resnet20 --macs 0.7 0.5 0.39

Each way starts from the published network (``$L0PRUNE_DATA/../models``) and meets the same MACs on
widths alone:

- ``fisher``: ``fit`` by the Fisher score, which looks at labels and gradients of 2,000 images;
- ``recalibrated``: the same, with the statistics of BatchNorm from the 512 images;
- ``compensated``: the same, and ``compensate`` with these images;
- ``divided``: ``fit(…, compensate=True)``, which looks at no label and no gradient.

Each row is JSON: error on the 10,000 test images, and the seconds that the way took.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.cifar import CHECKPOINTS
from l0prune.capture.compat import BatchNormBase
from l0prune.data.dataset import Tensors
from l0prune.files.consent import RECIPES

IMAGES = 512


def main(argv: list[str] | None = None) -> None:
    """Print a row for each way and share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=sorted(CHECKPOINTS), default="resnet20")
    parser.add_argument("--macs", type=float, nargs="+", default=[0.7, 0.5, 0.39])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    weights = Path(os.environ["L0PRUNE_DATA"]).parent / "models" / CHECKPOINTS[args.network]
    model = l0prune.load_model(f"{RECIPES / 'vision.py'}:{args.network}", str(weights))
    data = l0prune.load_data("cifar10")
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(args.seed))
    assert isinstance(data.train, Tensors)
    few = Tensors(data.train.inputs[chosen[:IMAGES]], data.train.targets[chosen[:IMAGES]])
    row(args, "dense", 1.0, model, data, 0.0)
    l0prune.gate(model, torch.zeros(2, 3, 32, 32), branches=False, seed=args.seed)
    for share in args.macs:
        for way in args.ways:
            cut = copy.deepcopy(model)
            begun = time.perf_counter()
            WAYS[way](cut, f"macs={share}", data, l0prune.Task(few))
            row(args, way, share, cut, data, time.perf_counter() - begun)


def row(args: Any, way: str, share: float, model: nn.Module, data: Any, seconds: float) -> None:
    """Print one."""
    error = l0prune.evaluate(model, data)["error"]
    found = {"network": args.network, "way": way, "macs": share, "seed": args.seed}
    print(json.dumps({**found, "error": round(error, 4), "seconds": round(seconds, 1)}), flush=True)


def fisher(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Cut by the Fisher score."""
    l0prune.fit(model, budget, l0prune.score(model, "fisher", data, batches=20))


def recalibrated(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Cut so, and let BatchNorm see the images."""
    fisher(model, budget, data, few)
    norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # type: ignore[assignment]
        norm.train()
    with torch.no_grad():
        for inputs, _ in few.train.batches(64):
            model(inputs)
    model.eval()


def compensated(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Cut so, and compensate."""
    fisher(model, budget, data, few)
    l0prune.compensate(model, few, samples=IMAGES)


def divided(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Divide, cut and compensate."""
    l0prune.fit(model, budget, data=few, compensate=True)


WAYS: dict[str, Callable[[nn.Module, str, Any, Any], None]] = {
    "fisher": fisher,
    "recalibrated": recalibrated,
    "compensated": compensated,
    "divided": divided,
}


if __name__ == "__main__":
    main()
