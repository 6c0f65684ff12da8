"""What gates cost in training: a gated step against a plain one, on the CPU, alternating.

A step is forward, backward and Adam at batch 100; the gated one draws its sample and adds the
penalty, too. In a settled one the gates stand, as in the last phase of a run; in a switched one
whole branches have gates as well, where the network has any. Prints the medians of the ratios of
neighbouring steps; exits with 1 where that of the gated one is above its target. With one thread,
times are those of the thread on the CPU, which other programs disturb less.

    python -m benchmarks.step [--rounds 400] [--threads 2] [--models MLP ResNet-18]
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import l0prune
from benchmarks.runner import machine, options, table
from recipes.vision import lenet5

BATCH = 100
PRICE = 0.1 / 60_000


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


def adam(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=1e-3)


def stepper(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    price: float | None = PRICE,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = adam,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    run: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[], None]:
    """A step: forward (of ``run``, if it is compiled), penalty of a gated model, backward, update.

    Without a price the gates of a model stand.
    """
    is_gated = any("l0prune_gates" in name for name, _ in model.named_modules())
    learns = is_gated and price is not None
    optimizer = make(l0prune.param_groups(model) if learns else list(model.parameters()))
    forward = run or model

    def step() -> None:
        optimizer.zero_grad()
        with context():
            loss = nn.functional.cross_entropy(forward(inputs), labels)
        if learns:
            loss = loss + l0prune.penalty(model, price)
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
    prices = {"settled": None}
    steps = {
        kind: stepper(model, inputs, labels, prices.get(kind, PRICE))
        for kind, model in models.items()
    }
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


def main() -> bool:
    given = options(
        __doc__, threads=(torch.get_num_threads(), None), rounds=(400, "steps of the smallest"),
        models=([""], "beginnings of their names"),
    )  # fmt: skip
    print(f"{machine()}, batch {BATCH}, Adam")
    missed = []

    def row(name: str) -> list[str]:
        make, shape, target, share = CASES[name]
        plain, gated, *ratios = measure(make, shape, max(6, int(given.rounds * share)))
        missed.extend([name] if ratios[0] > target else [])
        shown = (f"{each:.3f}" for each in ratios)
        return [name, f"{plain:.2f}", f"{gated:.2f}", f"{target:.2f}", *shown]

    names = (name for name in CASES if name.startswith(tuple(given.models)))
    table("model | plain, ms | gated, ms | target | ratio | settled | switched", map(row, names))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
