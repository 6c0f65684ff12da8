"""What gates cost in training: a gated step against a plain one, on the CPU, alternating.

A step is forward, backward and Adam at batch 100; the gated one draws its sample and adds the
penalty, too. Prints the median of the ratios of neighbouring steps; exits with 1 where one is
above its target.

    python benchmarks/step.py [--rounds 200] [--threads 2]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

import l0prune

BATCH = 100


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def lenet5() -> nn.Module:
    """LeNet-5-Caffe, 20-50-800-500."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def resnet18() -> nn.Module:
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    # name: (model, shape of one example, target ratio, share of the rounds)
    "MLP 784-300-100": (mlp, (784,), 1.25, 1.0),
    "LeNet-5 20-50-800-500": (lenet5, (1, 28, 28), 1.10, 0.5),
    "ResNet-18, 3x32x32": (resnet18, (3, 32, 32), 1.10, 0.05),
}


def stepper(model: nn.Module, inputs: Tensor, labels: Tensor, gated: bool) -> Callable[[], None]:
    groups = l0prune.param_groups(model) if gated else list(model.parameters())
    optimizer = torch.optim.Adam(groups, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if gated:
            loss = loss + l0prune.penalty(model, 0.1 / 60_000)
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> list[float]:
    """Medians: plain ms, gated ms, ratio."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))
    plain = make().train()
    gated = l0prune.gate(copy.deepcopy(plain), (inputs[:2],))
    steps = [stepper(plain, inputs, labels, False), stepper(gated, inputs, labels, True)]
    for step in steps:
        for _ in range(max(3, rounds // 10)):
            step()
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)  # neither always runs on the other's warm caches
        taken = {which: seconds(steps[which]) for which in order}
        pairs.append((taken[0] * 1e3, taken[1] * 1e3, taken[1] / taken[0]))
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="steps of the smallest model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, batch {BATCH}, Adam")
    print(f"{'model':24}{'plain ms':>10}{'gated ms':>10}{'ratio':>8}{'target':>8}")
    missed = False
    for name, (make, shape, target, share) in CASES.items():
        plain, gated, ratio = measure(make, shape, max(5, int(options.rounds * share)))
        missed |= ratio > target
        print(f"{name:24}{plain:10.2f}{gated:10.2f}{ratio:8.3f}{target:8.2f}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
