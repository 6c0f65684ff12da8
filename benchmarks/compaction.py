"""What a whole fine-tuning run under a budget costs, beside dense training of the same epochs.

    python -m benchmarks.compaction [--networks resnet56 …] [--compact auto settle never]
        [--gates widths branches both] [--epochs 30]
    python -m benchmarks.compaction --errors 5

Each network learns noisy pictures of ten classes, made from a seed: dense, by a bare loop of
PyTorch, and by ``finetune`` under ``macs=0.5`` and ``0.25`` with its default phases and rates of
the gates. There is no test data, no average and no recalibration, which the bare loop has not
either. Gates are on widths, on whole branches, or on both. Seconds are those of the CPU, of one
thread, so that other programs disturb little, all in one process. *Training MACs* is the share that
the steps had at the sizes that the network had then. An epoch is some thirty steps: in few of them
what a run costs once (looks at the data, proofs of cuts) weighs more.
*Memory* is what a training step needs at the last size, as a share of what it needs at the first:
weights, gradients, Adam's two moments, and all that the forward keeps for the backward. *Last step*
is what a step at the last size takes of a dense step's time: medians of steps in turn.

With ``--errors`` it says what the cut costs in accuracy: errors on the digits of scikit-learn, with
so many seeds.

Rows are JSON lines in ``runs/compaction.jsonl``; what is there already is not done again, and
``--table`` prints them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from math import nan
from statistics import median
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import l0prune
from benchmarks.isolation import ROOT, Row, append, rows
from benchmarks.runner import Some, options, table
from benchmarks.step import seconds, stepper
from l0prune.data import Tensors
from l0prune.training.compaction import Compaction
from l0prune.training.run import train_dense
from recipes.vision import digits_lenet, resnet56

PATH = ROOT / "runs" / "compaction.jsonl"
CLASSES = 10
BUDGETS = (0.5, 0.25)
GATES: dict[str, dict[str, Any]] = {
    "widths": {"branches": False},
    "branches": {"branches": True, "exclude": "*"},
    "both": {},
}
NUMBERS = {
    "ratio": "seconds / dense",
    "training_macs": "training MACs",
    "last_step": "last step",
    "memory": "memory",
}
KEY = ("network", "gates", "budget", "compact", "epochs")


def mobilenet() -> nn.Module:
    model: nn.Module = torchvision.models.mobilenet_v2(num_classes=CLASSES)
    return model


def vit() -> nn.Module:
    """Six blocks of width 192 over 64 patches."""
    model: nn.Module = torchvision.models.VisionTransformer(
        32, 4, 6, 6, 192, 768, num_classes=CLASSES
    )
    return model


# By name: the model, the side of its pictures, pictures, batch size.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "resnet56": (resnet56, 32, 960, 32),
    "mobilenet_v2": (mobilenet, 96, 960, 32),
    "vit": (vit, 32, 960, 32),
}


def pictures(side: int, count: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % CLASSES
    centres = torch.randn(CLASSES, 3, 8, 8, generator=generator)
    clean = nn.functional.interpolate(centres, side, mode="bilinear")
    noise = torch.randn(count, 3, side, side, generator=generator)
    return Tensors(clean[targets] + noise, targets)


def bare(model: nn.Module, data: Tensors, batch: int, epochs: int) -> float:
    """CPU seconds of a loop without anything of l0prune's."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began = time.process_time()
    for _ in range(epochs):
        for chosen in torch.randperm(len(data), generator=generator).split(batch):
            loss = nn.functional.cross_entropy(model(data.inputs[chosen]), data.targets[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return time.process_time() - began


def gated(
    model: nn.Module, data: Tensors, batch: int, epochs: int, budget: float, compact: str
) -> Row:
    """The run under a budget."""
    began = time.process_time()
    how: Row = {"ema": 0.0, "recalibrate": 0, "progress": False, "compact": compact}
    how |= {"epochs": epochs, "batch_size": batch, "budget": f"macs={budget}"}
    history = l0prune.finetune(model, data, **how)
    taken = time.process_time() - began
    return {"seconds": taken, "training_macs": history.last["training_macs"]}


def memory(model: nn.Module, data: Tensors, batch: int) -> float:
    """Bytes that a step with Adam needs."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(data.inputs[:batch])
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    activations = sum(size for key, size in kept.items() if key not in weights)
    return activations + 4 * sum(weights.values())


def last_step(small: nn.Module, dense: nn.Module, data: Tensors, batch: int) -> float:
    """CPU seconds of a step of the first as a share of the other's."""
    inputs, targets = data.inputs[:batch], data.targets[:batch]
    both = [stepper(model.train(), inputs, targets, None) for model in (small, dense)]
    turns = [[seconds(step) for step in both] for _ in range(12)]
    mine, its = map(median, zip(*turns, strict=True))
    return mine / its


def steps(name: str, gates: str, modes: list[str], epochs: int) -> Iterator[Row]:
    """Rows of one network with gates on these."""
    make, side, count, batch = NETWORKS[name]
    data, example = pictures(side, count), torch.zeros(2, 3, side, side)
    torch.manual_seed(0)
    dense = bare(make().train(), data, batch, epochs)
    for budget in BUDGETS:
        for mode in modes:
            torch.manual_seed(0)
            model = l0prune.gate(make(), example, **GATES[gates])
            whole = memory(model, data, batch)
            row = gated(model, data, batch, epochs, budget, mode)
            small = Compaction(model)
            l0prune.gates(model).fixed = True
            small.begin()
            row["memory"] = memory(model, data, batch) / whole
            row["last_step"] = last_step(model, make(), data, batch)
            small.end()
            key = dict(zip(KEY, (name, gates, budget, mode, epochs), strict=True))
            yield {**key, "dense": dense, "ratio": row["seconds"] / dense, **row}


def errors(modes: list[str], seeds: int) -> Iterator[tuple[object, ...]]:
    """Test errors of a small network on the digits of scikit-learn, cut early, late and never."""
    data = l0prune.load_data("digits")
    for budget, mode in product(BUDGETS, modes):
        found, work = [], []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = digits_lenet()
            how: Row = {"seed": seed, "progress": False}
            train_dense(model, data, epochs=30, **how)
            l0prune.gate(model, torch.zeros(2, 1, 8, 8))
            how |= {"epochs": 60, "budget": f"macs={budget}", "compact": mode}
            last = l0prune.finetune(model, data, **how).last
            found.append(100 * last["error"])
            work.append(last["training_macs"])
        each = ", ".join(f"{error:.2f}" for error in found)
        yield budget, mode, f"{sum(found) / seeds:.2f} %", each, f"{sum(work) / seeds:.2f}"


def main() -> None:
    given = options(
        __doc__, networks=Some(NETWORKS), compact=["auto", "never"], epochs=10, table=False,
        gates=Some(GATES, ["widths"]), errors=(0, "seeds"),
    )  # fmt: skip
    if given.errors:
        head = "budget | compact | error: mean | of each seed | training MACs"
        return table(head, errors(given.compact, given.errors))
    for name, gates in product(given.networks, given.gates) if not given.table else ():
        known = {tuple(map(row.get, KEY)) for row in rows(PATH, KEY)}
        last, epochs = BUDGETS[-1], given.epochs
        left = [m for m in given.compact if (name, gates, last, m, epochs) not in known]
        for row in steps(name, gates, left, epochs) if left else ():
            append(PATH, row)
    found = rows(PATH, KEY)
    table(
        " | ".join((*KEY, *NUMBERS.values())),
        ([*map(row.get, KEY), *(f"{row.get(each, nan):.2f}" for each in NUMBERS)] for row in found),
    )


if __name__ == "__main__":
    main()
