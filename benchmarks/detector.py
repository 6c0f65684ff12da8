"""YOLO11n on a synthetic set, cut to half of its MACs: l0prune beside Torch-Pruning.

    python -m benchmarks.detector [--ways l0prune group-magnitude …] [--epochs 6] [--images 400]

A YOLO11n of ultralytics with random weights is trained for some epochs on images made in memory:
discs, squares and triangles of random colours on noise. Each way begins with that network and has
the same number of epochs more, in one loop, with ultralytics' own loss, AdamW and the same rates:

- ``l0prune``: gates that learn in the loop, after a first cut by scores (``Pruner.start_from``);
- ``group-magnitude``: cut by l0prune with that score alone, then trained;
- ``dense``: as it is, for what the epochs alone give;
- ``at-once``: cut by l0prune with the scores that gates start from, then trained;
- ``torch-pruning``: its group pruner cuts all layers by the same share (``benchmarks.depgraph``),
  the head left whole, no block rewritten, then trained. The cut may take LIMIT seconds of a CPU.

mAP is of the test images, with ultralytics' own suppression, matching and ``ap_per_class``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import l0prune
from benchmarks import depgraph, today
from benchmarks.isolation import Late, within
from benchmarks.runner import Some, options, table
from benchmarks.ways import macs

SHARE, LIMIT = 0.5, 120
KINDS, BATCH = 3, 16
RATES = {"lr": 2e-3, "weight_decay": 5e-4}


def picture(size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """One image, shape (3, size, size), and a row of kind and box (middle and size) a shape."""
    image = 0.5 * torch.rand(3, size, size, generator=random)
    across, down = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy")
    taken, rows = torch.zeros(size, size, dtype=torch.bool), []
    for _ in range(int(torch.randint(1, 4, (), generator=random))):
        kind = int(torch.randint(KINDS, (), generator=random))
        side = size * float(0.2 + 0.25 * torch.rand((), generator=random))
        x, y = (side / 2 + (size - side) * torch.rand(2, generator=random)).tolist()
        u, v = (across + 0.5 - x) / side, (down + 0.5 - y) / side  # -1/2 to 1/2 within its box
        square = (u.abs() <= 0.5) & (v.abs() <= 0.5)
        if bool((taken & square).any()):
            continue
        inside = (u**2 + v**2 <= 0.25, square, square & (2 * u.abs() <= v + 0.5))[kind]
        taken |= square
        colour = 0.4 + 0.6 * torch.rand(3, 1, generator=random)
        image[:, inside] = colour + 0.1 * torch.randn(3, int(inside.sum()), generator=random)
        rows.append(torch.tensor([kind, x / size, y / size, side / size, side / size]))
    return image.clamp(0, 1), torch.stack(rows)


def collated(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Images, and the targets as ultralytics has them."""
    images, rows = zip(*examples, strict=True)
    index = torch.cat([torch.full((len(each),), float(i)) for i, each in enumerate(rows)])
    kinds, boxes = torch.cat(rows).split([1, 4], dim=1)
    return torch.stack(images), {"batch_idx": index, "cls": kinds, "bboxes": boxes}


def train(model: Any, loader: DataLoader, loss: Any, epochs: int, pruner: Any) -> None:
    """The loop of all ways: AdamW, a rate that rises for a tenth of the steps, then falls to 0."""
    groups: Any = model.parameters() if pruner is None else pruner.param_groups(**RATES)
    optimizer = torch.optim.AdamW(groups, **RATES)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATES["lr"], epochs * len(loader), pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for images, targets in chain.from_iterable(loader for _ in range(epochs)):
        loss(model(images), targets).backward()
        if pruner is not None:
            pruner.before_step(optimizer)
        optimizer.step()
        if pruner is not None:
            pruner.after_step()
        rates.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def mean_ap(model: Any, loader: DataLoader) -> tuple[float, float]:
    """mAP at an IoU of 0.5, and the mean over 0.5 to 0.95."""
    from ultralytics.engine.validator import BaseValidator
    from ultralytics.utils.metrics import ap_per_class, box_iou
    from ultralytics.utils.nms import non_max_suppression
    from ultralytics.utils.ops import xywh2xyxy

    matching: Any = SimpleNamespace(iouv=torch.linspace(0.5, 0.95, 10))
    found = []
    for images, targets in loader:
        answers = non_max_suppression(model(images)[0], 0.001, 0.7, max_time_img=60.0)
        for i, answer in enumerate(answers):
            mine = targets["batch_idx"] == i
            kinds = targets["cls"][mine].flatten()
            ious = box_iou(xywh2xyxy(targets["bboxes"][mine]) * images.shape[-1], answer[:, :4])
            hits = BaseValidator.match_predictions(matching, answer[:, 5], kinds, ious)
            found.append((hits, answer[:, 4], answer[:, 5], kinds))
    ap = ap_per_class(*(torch.cat(each).numpy() for each in zip(*found, strict=True)))[5]
    return float(ap[:, 0].mean()), float(ap.mean())


def learned(model: Any, example: Tensor, loader: DataLoader, loss: Any, steps: int) -> Any:
    l0prune.gate(model, example)
    pruner = l0prune.Pruner(model, budget=f"macs={SHARE}", steps=steps)
    pruner.start_from(loader, loss=loss)
    return pruner


def scored(how: str, model: Any, example: Tensor, loader: DataLoader, loss: Any, _: int) -> None:
    l0prune.gate(model, example, branches=None if how == "auto" else False)
    scores = l0prune.score(model, how, loader, loss=loss)
    data: Any = {"data": loader, "loss": loss} if how == "auto" else {}
    l0prune.fit(model, f"macs={SHARE}", scores, **data)


def grouped(model: Any, example: Tensor, *_: Any) -> None:
    """By Torch-Pruning, which does not see what is frozen."""
    model.requires_grad_(True)
    count = partial(macs, example=example)
    with within(LIMIT):
        pruner = depgraph.pruner(model, example, model.model[-1], uniform=True)
        depgraph.shrink(pruner, model, count, SHARE * count(model))
    model.model[-1].dfl.requires_grad_(False)  # as it was


WAYS: dict[str, Callable[..., Any]] = {
    "l0prune": learned,
    "group-magnitude": partial(scored, "group-magnitude"),
    "dense": lambda *_: None,
    "at-once": partial(scored, "auto"),
    "torch-pruning": grouped,
}


def main() -> None:
    """Print a table, a row for each way."""
    given = options(
        __doc__, ways=Some(WAYS), epochs=(6, "of each way"), seed=0,
        dense_epochs=(12, "of the network before"), size=(96, "of an image, a multiple of 32"),
        images=(400, "for training; a quarter to test"),
    )  # fmt: skip
    torch.manual_seed(given.seed)
    random = torch.Generator().manual_seed(given.seed)
    pictures: Any = [picture(given.size, random) for _ in range(given.images * 5 // 4)]
    batched = partial(DataLoader, batch_size=BATCH, collate_fn=collated)
    loader = batched(pictures[: given.images], shuffle=True)
    test = batched(pictures[given.images :])
    base: Any = today.ultralytics("DetectionModel", "yolo11n.yaml", classes=KINDS)[0]
    example = torch.rand(2, 3, given.size, given.size)
    criterion, whole = base.init_criterion(), macs(base, example)

    def loss(outputs: Any, targets: Any) -> Tensor:
        return criterion(outputs, targets)[0].sum() / BATCH

    def row(name: str, way: str, model: Any, epochs: int) -> tuple[object, ...]:
        torch.manual_seed(given.seed)
        start = time.process_time()
        try:
            pruner = WAYS[way](model, example, loader, loss, epochs * len(loader))
        except (Exception, Late) as error:  # what a tool says is its row
            return f"`{name}`", f"{type(error).__name__}: {str(error)[:200]}", *[""] * 5
        train(model, loader, loss, epochs, pruner)
        if way not in ("dense", "torch-pruning"):
            model = l0prune.export(model).module
        seconds, (half, mean) = time.process_time() - start, mean_ap(model, test)
        share, size = macs(model, example) / whole, sum(p.numel() for p in model.parameters())
        numbers = f"{half:.3f}", f"{mean:.3f}", f"{seconds:.0f}"
        return f"`{name}`", epochs, f"{share:.1%}", f"{size:,}", *numbers

    def rows() -> Iterator[tuple[object, ...]]:
        yield row("before", "dense", base, given.dense_epochs)
        for way in given.ways:
            yield row(way, way, copy.deepcopy(base), given.epochs)

    table(" | epochs | MACs | parameters | mAP50 | mAP50-95 | CPU s", rows())


if __name__ == "__main__":
    main()
