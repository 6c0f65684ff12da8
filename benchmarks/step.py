"""What gates cost in training: a gated step against a plain one, on the CPU, alternating.

A step is forward, backward and Adam at batch 100; the gated one draws its sample and adds the
penalty, too. In a settled one the gates stand, as in the last phase of a run; in a switched one
whole branches have gates as well, where the network has any. Prints the medians of the ratios of
neighbouring steps; exits with 1 where that of the gated one is above its target. With one thread,
times are those of the thread on the CPU, which other programs disturb less.

    python -m benchmarks.step [--rounds 400] [--threads 2] [--models MLP ResNet-18]
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

import l0prune
from recipes.vision import lenet5

BATCH = 100


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def resnet18() -> nn.Module:
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    # name: (model, shape of one example, target ratio, share of the rounds)
    "MLP 784-300-100": (mlp, (784,), 1.15, 1.0),
    "LeNet-5 20-50-800-500": (lenet5, (1, 28, 28), 1.02, 0.2),
    "ResNet-18, 3x32x32": (resnet18, (3, 32, 32), 1.02, 0.05),
}


def stepper(model: nn.Module, inputs: Tensor, labels: Tensor, kind: str) -> Callable[[], None]:
    """A step of a model that is ``"plain"``, ``"settled"``, or gated in one way or the other."""
    groups = list(model.parameters()) if kind == "plain" else l0prune.param_groups(model)
    optimizer = torch.optim.Adam(groups, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if kind in ("gated", "switched"):
            loss = loss + l0prune.penalty(model, 0.1 / 60_000)
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    step()
    return clock() - start


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> list[float]:
    """Medians: plain ms, gated ms, ratios of the gated, the settled and the switched step."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))
    plain = make().train()
    gated, settled = (
        l0prune.gate(copy.deepcopy(plain), (inputs[:2],), branches=False) for _ in range(2)
    )
    l0prune.gates(settled).fixed = True
    models = {"plain": plain, "gated": gated, "settled": settled}
    if l0prune.gates(gated).plan.branches:
        models["switched"] = l0prune.gate(copy.deepcopy(plain), (inputs[:2],))
    steps = {kind: stepper(model, inputs, labels, kind) for kind, model in models.items()}
    for step in steps.values():
        for _ in range(max(3, rounds // 10)):
            step()
    rows = []
    kinds = list(steps)
    for number in range(rounds):
        turn = number % len(kinds)  # none always runs on the caches that the same other one left
        taken = {kind: seconds(steps[kind]) for kind in kinds[turn:] + kinds[:turn]}
        one = taken["plain"]
        ratios = [taken.get(kind, math.nan) / one for kind in ("gated", "settled", "switched")]
        rows.append((one * 1e3, taken["gated"] * 1e3, *ratios))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="steps of the smallest model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", nargs="+", default=[""], help="beginnings of their names")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, batch {BATCH}, Adam")
    columns = f"{'ratio':>8}{'target':>8}{'settled':>9}{'switched':>10}"
    print(f"{'model':24}{'plain ms':>10}{'gated ms':>10}{columns}")
    missed = False
    for name, (make, shape, target, share) in CASES.items():
        if not name.startswith(tuple(options.models)):
            continue
        rounds = max(6, int(options.rounds * share))
        plain, gated, ratio, settled, switched = measure(make, shape, rounds)
        missed |= ratio > target
        row = f"{name:24}{plain:10.2f}{gated:10.2f}{ratio:8.3f}{target:8.2f}{settled:9.3f}"
        row += "" if math.isnan(switched) else f"{switched:10.3f}"
        print(row, flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
