"""CIFAR-10 ResNets pruned to the same MACs by learned gates, by scores, and by Torch-Pruning.

    python -m benchmarks.cifar --network resnet56 --macs 0.47 0.39 --epochs 200 --device cuda
    python -m benchmarks.cifar --network resnet20 --ways l0prune tp-group-sl --seed 0 1 2

Published checkpoints (``$L0PRUNE_DATA/../models``) are first trained on the data at hand; all ways
start from the network that this gives. Torch-Pruning cannot cut their shortcuts, which pad channels
(it cuts other channels than it means to, and the network no longer runs). So the shortcuts become
1×1 convolutions, as in its own ResNet-56, that compute the same at first and learn like all else.
``--network vit`` is a small one without a checkpoint:
it is trained from random weights, wants more ``--dense-epochs``, and has Adam at 1e-3. A way then
has ``--epochs``, over all of its phases:

- ``dense``: nothing is cut; how much is due to training on?
- ``l0prune``: half of them with gates that learn under ``budget="macs=…"``, at a constant rate (the
  default), cut, the other half;
- ``l0prune-any``: the same with any widths (``round_to=1``), where the default has blocks;
- ``l0prune-alone``: one run of ``finetune`` with its defaults, of which gates learn for 70 %, and
  nothing after it;
- ``tp-group-norm``: cut at once, then all epochs;
- ``tp-group-norm-uniform``: the same, with as large a share of each layer;
- ``tp-group-sl``: sparsity learning for half of them, cut, the other half (its authors: 100 + 100);
- ``l0prune-widths``: gates on widths alone; ``l0prune-alike``: these do not start from a score;
- ``l0prune-at-once``: nothing learns what goes: ``fit`` with data, then all epochs;
- ``PENALTY``, any of ``finetune(penalty=…)``: as ``l0prune-alike``, with the penalty on the weights
  of slots in place of gates that learn;
- ``SCORE``, any of ``l0prune.score`` (over 100 batches, if it looks at data, of less data fewer):
  ``fit`` to the budget at once, then all epochs.

With ``--training-macs 4.2`` in the place of ``--epochs`` each way has so many as cost what 4.2
epochs of the dense network do, by the MACs of its steps and of a score's looks at the data: cutting
at once buys more epochs. Gates then have about half of these MACs, or ``--gate-epochs``.

All are trained by the same loop at batch 128 with the same augmentation, averaging and BatchNorm
recalibration, and with what Torch-Pruning's authors recommend (``benchmarks.depgraph``): SGD with
momentum 0.9, rate 0.01, weight decay 5e-4 except in sparsity learning. Each phase of a way has one
cosine from that rate to 0; ``--rate`` is another rate, and ``--distill 0.5`` takes half of the loss
from the dense network, whose forwards count as training: both for all ways alike.
``--autocast bf16`` trains all of them with it, which halves the time on a CPU that has the
instructions. MACs are counted by ``torch.utils.flop_counter``, and no cut leaves more than asked.
The error is that of the cut model after the last epoch, in full precision, the seconds are those of
its training.

Rows are JSON lines in ``runs/cifar.jsonl``; what is there already is not done again, and a run that
was stopped goes on from its last epoch.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

import l0prune
from benchmarks.budgets import part
from benchmarks.isolation import ROOT, Row, append, rows
from benchmarks.runner import CHECKPOINTS, One, Some, arguments, published, table
from benchmarks.ways import ADAM, ALL_WAYS, SGD, WAYS, Job, macs
from l0prune.data import Data
from l0prune.training.history import NAME

RUNS = ROOT / "runs"
NETWORKS = (*CHECKPOINTS, "vit")
# What makes a row: those that agree in all of these are the same measurement.
KEY = (
    "network", "way", "budget", "epochs", "dense_epochs", "examples", "autocast", "seed",
    "training_macs", "gate_epochs", "rate", "distill",
)  # fmt: skip


def measure(way: str, model: nn.Module, share: float, job: Job) -> Row:
    """What comes of one way; ``model`` is left as it is."""
    cut = ALL_WAYS[way](copy.deepcopy(model), share, job)
    return figures(model, cut.model, job) | {"training": round(cut.spent, 2)}


def figures(model: nn.Module, cut: nn.Module, job: Job) -> Row:
    """Of a network and what was made of it."""
    both = model, cut
    whole, left = (macs(each, job.example()) for each in both)
    before, after = (l0prune.evaluate(e, job.data, device=job.device)["error"] for e in both)
    size, small = (sum(p.numel() for p in each.parameters()) for each in both)
    return {
        "macs": left,
        "macs_share": round(left / whole, 4),
        "params": small,
        "params_before": size,
        "dense_error": round(before, 4),
        "error": round(after, 4),
        "seconds": round(seconds(job.folder), 1),
    }


def seconds(folder: Path) -> float:
    """How long all training in a run's folder took, over all of its phases."""
    lines = (line for path in folder.rglob(NAME) for line in path.open(encoding="utf-8"))
    return sum(json.loads(line)["seconds"] for line in lines)


def vit() -> nn.Module:
    """A small ViT: eight blocks of width 64 over 64 patches."""
    return VisionTransformer(32, 4, 8, 4, 64, 256, num_classes=10)


def start(network: str, epochs: int, job: Job) -> nn.Module:
    """The network that all ways start from: published or new, trained on this data, and kept."""
    if network in CHECKPOINTS:
        model = published(network)
        project(model)
    else:
        torch.manual_seed(job.seed)
        model = vit()
    path = job.folder / "dense.pt"
    if path.exists():
        return l0prune.load(path, model)
    l0prune.train_dense(model, job.data, **job.settings("dense", epochs))
    l0prune.save(model, path, {"network": network})
    return model


class Projected(nn.Module):
    """A block of the recipes' ResNet with its padding shortcut as a 1×1 convolution."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = block.conv1, block.bn1, block.conv2, block.bn2
        inputs, outputs = block.conv1.in_channels, block.conv2.out_channels
        self.shortcut = nn.Conv2d(inputs, outputs, 1, block.stride, bias=False)
        with torch.no_grad():
            self.shortcut.weight.zero_()
            self.shortcut.weight[block.padding : block.padding + inputs, :, 0, 0] = torch.eye(
                inputs
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def project(model: nn.Module) -> None:
    """Make every padding shortcut of the model a convolution that computes the same, in place."""
    for layer in (model.layer1, model.layer2, model.layer3):
        for index, block in enumerate(layer):
            if block.stride > 1:
                layer[index] = Projected(block)


def cells(row: Row, share: str = "macs_share") -> tuple[str, ...]:
    """Cells of a row: what it is about, and what it was brought to."""
    about = row["network"], row["way"], row["seed"], f"{row['training']:.1f}"
    return *about, f"{row[share]:.1%}", f"{row['params']:,} of {row['params_before']:,}"


def print_means(found: Iterable[Row], share: str = "macs_share") -> None:
    """Print means over seeds with their standard deviations, if there are several seeds.

    Args:
        found: the rows.
        share: what ways are brought to as much of, and the name of its column.
    """
    groups: dict[tuple[str, float, str], list[Row]] = defaultdict(list)
    for row in found:
        groups[row["network"], -row["budget"], row["way"]].append(row)
    made = []
    for (network, _, way), alike in sorted(groups.items()):
        if len(alike) > 1:
            errors, seeds = [row["error"] for row in alike], [str(row["seed"]) for row in alike]
            shown = f"{mean(row[share] for row in alike):.1%}"
            epochs = f"{mean(row['training'] for row in alike):.1f}"
            error = f"{mean(errors):.2%} ± {stdev(errors):.2%}"
            made.append((network, way, ", ".join(seeds), epochs, shown, error))
    if made:
        print()
        table(f"network | way | seeds | training, dense epochs | {share} | error", made)


def main() -> None:
    ways = Some(ALL_WAYS, WAYS)
    budgets = {
        "macs": ([0.47, 0.39], "to be left"),
        "training_macs": (float, "of a way, in epochs of the dense network, for --epochs"),
    }
    given = checked(__doc__, ways, RUNS / "cifar", **budgets)
    found = run(given, given.macs, measure)
    table(
        "network | way | seed | training, dense epochs | MACs | params | error | to dense | s",
        (
            (*cells(row), f"{row['error']:.2%}", f"{row['error'] - row['dense_error']:+.2%}",
             f"{row['seconds']:,.0f}")
            for row in sorted(found, key=lambda row: (row["network"], -row["budget"], row["way"]))
        ),
    )  # fmt: skip
    print_means(found)


def checked(about: str | None, ways: Some, out: Path, **more: Any) -> argparse.Namespace:
    """The options of all comparisons on CIFAR-10, if they make sense here."""
    parser = arguments(
        about, network=One(NETWORKS), ways=ways, out=(out, "rows go beside it"), device="auto",
        epochs=(40, "of a way, over all of its phases"),
        gate_epochs=(int, "of these with gates; default half"),
        dense_epochs=(20, "of what all ways start from"),
        examples=(50_000, "of the training data"),
        rate=(float, "of the weights, in the place of the usual one"),
        distill=(float, "part of the loss that the dense one gives"),
        autocast=(str, "bf16 or fp16"), seed=([0], "one after another"), **more,
    )  # fmt: skip
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs must be 2 or more: sparsity learning has two phases")
    given = getattr(options, "training_macs", None)
    limit = options.epochs if given is None else given
    # Those of a fixed cost may be more than epochs of the dense network: what is closed is cut.
    most = limit if given is None else math.inf
    if options.gate_epochs is not None and not 1 <= options.gate_epochs < most:
        parser.error(f"--gate-epochs must be 1 or more, and less than all there are ({limit:g})")
    if limit <= 0:
        parser.error("--training-macs must be above 0: epochs of the dense network")
    if options.rate is not None and not options.rate > 0:
        parser.error("--rate must be above 0")
    if options.distill is not None and not 0 < options.distill <= 1:
        parser.error("--distill must be above 0 and at most 1")
    if "L0PRUNE_DATA" not in os.environ:
        parser.error("set L0PRUNE_DATA to the folder of the data; checkpoints are in ../models")
    if any(map(_is_theirs, options.ways)) and importlib.util.find_spec("torch_pruning") is None:
        parser.error("torch-pruning is missing: pip install 'l0prune[benchmarks]'")
    return options


def _is_theirs(way: str) -> bool:
    return way.startswith("tp-")


def run(
    options: argparse.Namespace,
    shares: Iterable[float],
    measure: Callable[[str, nn.Module, float, Job], Row],
) -> list[Row]:
    """All rows that are asked for; those that are missing are measured and kept."""
    data = part(l0prune.load_data("cifar10"), options.examples)
    of_seeds = (argparse.Namespace(**vars(options) | {"seed": seed}) for seed in options.seed)
    return [row for each in of_seeds for row in _of_seed(each, data, shares, measure)]


def _of_seed(
    options: argparse.Namespace,
    data: Data,
    shares: Iterable[float],
    measure: Callable[[str, nn.Module, float, Job], Row],
) -> list[Row]:
    """Those of one seed: each has a dense network of its own."""
    common = {key: getattr(options, key, None) for key in KEY if key not in ("way", "budget")}
    of_ways = ("epochs", "training_macs", "gate_epochs", "rate", "distill")
    given = {key: str(value) for key, value in common.items() if value is not None}
    home = options.out / "-".join(text for key, text in given.items() if key not in of_ways)
    home.mkdir(parents=True, exist_ok=True)
    path = options.out.with_suffix(".jsonl")
    known = {tuple(map(row.get, KEY)): row for row in rows(path, KEY)}
    usual = SGD if options.network in CHECKPOINTS else ADAM
    job = Job(
        **{name: getattr(options, name) for name in ("epochs", "seed", "device", "autocast")},
        data=data, optimizer=usual if options.rate is None else usual | {"lr": options.rate},
        training_macs=common["training_macs"], gate_epochs=options.gate_epochs, folder=home,
    )  # fmt: skip
    # Its own rate is the same for all that start from it.
    first = replace(job, optimizer=usual, training_macs=None)
    model = start(options.network, options.dense_epochs, first)
    if options.distill is not None:
        job = replace(job, distill=options.distill, teacher=copy.deepcopy(model))
    found = []
    for share in shares:
        for way in options.ways:
            budget = 1.0 if way == "dense" else share
            made = common | {"way": way, "budget": budget}
            key = tuple(made[name] for name in KEY)
            if key not in known:
                asked = (given[key] for key in of_ways if key in given)
                folder = home / "-".join((way, str(budget), *asked))
                row = made | measure(way, model, share, replace(job, folder=folder))
                packages = ("torch", "torch-pruning") if _is_theirs(way) else ("torch",)
                row |= {package: importlib.metadata.version(package) for package in packages}
                print(json.dumps(row), flush=True)
                append(path, row)
                known[key] = row
            if known[key] not in found:
                found.append(known[key])
    return found


if __name__ == "__main__":
    main()
