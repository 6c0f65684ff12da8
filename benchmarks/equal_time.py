"""CIFAR-10 ResNets pruned to the same milliseconds in ONNX Runtime, by l0prune and Torch-Pruning.

    python -m benchmarks.equal_time --network resnet20 --time 0.5 --epochs 6

As ``benchmarks.cifar`` (networks, data, training, what the options mean), but each way is to come
to a share of the dense network's time: one thread, batch 1. Files are written by torch.onnx.export
for all ways alike, and timed in turns with the dense network's. The ways:

- ``l0prune``: gates of widths and whole branches learn under ``budget="latency=…"``, for half of
  the epochs;
- ``l0prune-branches``: only whole branches have gates; ``l0prune-widths``: only widths do;
- ``l0prune-8``: these with ``round_to=8``, where the table says what the runtime likes;
- ``l0prune-macs-8``: these under ``budget="macs=…"`` with ``round_to=8``;
- ``tp-8``, ``tp-16``: Torch-Pruning's group norm with its ``round_to``, cut at once;
- ``fisher``: our one-shot score, ``fit`` to the budget in latency; ``ablation-branches``: another
  one, of whole branches alone;
- ``fisher-per-ms``: the same with each score over the time that its axis' slots take in the dense
  network;
- ``fisher-macs-8``: the score's choice for a budget in MACs, with ``round_to=8``.

For budgets in MACs, which say nothing of time, the largest that comes to the wanted time is
searched for: by cutting the untrained network, and timing it. What the trained one takes is in the
table; it is more where a way cannot prune so far.

Rows are JSON lines in ``runs/equal_time.jsonl``. The files stay in the folders of the ways, so that
``--again`` can time them once more: when a run had neighbours, and the machine is quiet now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import l0prune
from benchmarks import cifar, depgraph
from benchmarks.isolation import Row, append
from benchmarks.runner import Some, table
from benchmarks.ways import Cut, Job, branches_of, classifier, macs, trained, with_gates
from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.plan.limits import bounds, limits
from l0prune.plan.plan import Plan
from l0prune.selection.scores import FORWARDS

WIDTHS = {"branches": False}
BRANCHES = {"branches": True, "exclude": "*"}
EVERYTHING: dict[str, Any] = {}
DENSE, OWN = "dense.onnx", "own.onnx"
SECONDS = 2.0  # of a look at a file
TRIES = 7


class Clock:
    """Times networks beside the dense one, by files in a folder."""

    def __init__(self, dense: nn.Module, example: Tensor, folder: Path) -> None:
        self._example, self._folder = example[:1].clone(), folder
        folder.mkdir(parents=True, exist_ok=True)
        self._write(dense, DENSE)

    def share(self, model: nn.Module) -> float:
        """The time of a network over that of the dense one."""
        self._write(model, OWN)
        return share_of(self._folder)

    def _write(self, model: nn.Module, name: str) -> None:
        plain = copy.deepcopy(model).cpu().eval()
        torch.onnx.export(
            plain, (self._example,), self._folder / name, input_names=["x"], dynamo=True,
            external_data=False, verbose=False,
        )  # fmt: skip


def share_of(folder: Path) -> float:
    """The time of the small network of this folder over that of the dense one."""
    own, dense = (collect.Network(folder / name, 1, collect.CPU) for name in (OWN, DENSE))
    (given,) = own.session.get_inputs()
    x = np.random.default_rng(0).standard_normal(given.shape).astype(np.float32)
    return collect.share(**collect.networks_turns(own, dense, {given.name: x}, SECONDS))


def largest(prune: Callable[[float], nn.Module], clock: Clock, wanted: float) -> float:
    """The largest share of the MACs, of some that are tried, at which the time is met.

    Where a way cannot be made to meet it, the smallest to which it can prune.
    """
    low, high, met = 0.0, 1.0, None
    for _ in range(TRIES):
        middle = (low + high) / 2
        try:
            pruned = prune(middle)
        except (UsageError, depgraph.Unreached):
            low = middle
            continue
        if clock.share(pruned) <= wanted:
            low = met = middle
        else:
            high = middle
    return high if met is None else met


def in_latency(
    model: nn.Module,
    share: float,
    job: Job,
    clock: Clock,
    gates: Mapping[str, Any] = EVERYTHING,
    **settings: Any,
) -> Cut:
    l0prune.gate(model, (job.example(),), **gates)
    settings |= {"budget": f"latency={share}", "latency": measured(model, job)}
    return with_gates(model, job, **settings)


def measured(model: nn.Module, job: Job) -> l0prune.LatencyTable:
    """Kept, so that a run that was stopped goes on with the same one."""
    return l0prune.measure(model, folder=job.folder / "latency")


def in_macs(model: nn.Module, share: float, job: Job, clock: Clock) -> Cut:
    scores, _ = looked(model, job)
    found = largest(partial(fitted, model, scores=scores, round_to=8), clock, share)
    l0prune.gates(model).set_open(torch.ones(len(scores), dtype=torch.bool))
    return with_gates(model, job, budget=f"macs={found}", round_to=8)


def looked(
    model: nn.Module, job: Job, how: str = "fisher", gates: Mapping[str, Any] = WIDTHS
) -> tuple[Tensor, float]:
    """Scores of a model that is gated by this, and what they cost in epochs of the dense one."""
    l0prune.gate(model, (job.example(),), **gates)
    looks, cost = job.looks, 1.0
    if how == "ablation":  # some forwards for each branch; a step takes three
        looks |= {"batches": max(1, looks["batches"] // 50)}
        cost = FORWARDS * branches_of(model) / 3
    scores = l0prune.score(model, how, job.data, **looks)
    return scores, cost * looks["batches"] / job.steps


def fitted(model: nn.Module, macs_share: float, **settings: Any) -> nn.Module:
    """What is left at so many MACs."""
    l0prune.gates(model).set_open(torch.ones(len(settings["scores"]), dtype=torch.bool))
    l0prune.fit(model, f"macs={macs_share}", **settings)
    return l0prune.export(model).module


def scored(
    model: nn.Module,
    share: float,
    job: Job,
    clock: Clock,
    how: str = "fisher",
    per_ms: bool = False,
    gates: Mapping[str, Any] = WIDTHS,
) -> Cut:
    whole = macs(model, job.example())
    (scores, spent), table = looked(model, job, how, gates), measured(model, job)
    plan = l0prune.gates(model).plan
    if per_ms:
        scores = scores / marginal(plan, f"latency={share}", table)
    kinds = {axis.kind for axis in plan.axes}  # branches, too, if they have gates
    l0prune.fit(model, f"latency={share}", scores, latency=table, kinds=sorted(kinds))
    return trained(l0prune.export(model).module, whole, job, spent=spent)


def marginal(plan: Plan, limit: str, table: l0prune.LatencyTable) -> Tensor:
    """What each slot takes of what is limited in the dense network, the mean of its axis."""
    measure = bounds(plan, limits(limit), (table,))[0].measure
    open_ = torch.ones(plan.size, dtype=torch.float64, requires_grad=True)
    measure.expected(open_).backward()
    for axis in plan.axes:
        open_.grad[axis.slice] = open_.grad[axis.slice].mean()
    return open_.grad.clamp_min(1e-12)


def scored_in_macs(model: nn.Module, share: float, job: Job, clock: Clock) -> Cut:
    whole = macs(model, job.example())
    scores, spent = looked(model, job)
    cut = partial(fitted, model, scores=scores, round_to=8)
    return trained(cut(largest(cut, clock, share)), whole, job, spent=spent)


def group_norm(model: nn.Module, share: float, job: Job, clock: Clock, round_to: int) -> Cut:
    example = job.example()
    whole = macs(model, example)

    def cut(macs_share: float) -> nn.Module:
        small = copy.deepcopy(model)
        pruner = depgraph.pruner(small, example, classifier(small), round_to=round_to)
        depgraph.shrink(pruner, small, partial(macs, example=example), macs_share * whole)
        small.zero_grad()
        return small

    return trained(cut(largest(cut, clock, share)), whole, job)


WAYS: dict[str, Callable[[nn.Module, float, Job, Clock], Cut]] = {
    "l0prune": in_latency,
    "l0prune-branches": partial(in_latency, gates=BRANCHES),
    "l0prune-widths": partial(in_latency, gates=WIDTHS),
    "l0prune-8": partial(in_latency, gates=WIDTHS, round_to=8),
    "l0prune-macs-8": in_macs,
    "tp-8": partial(group_norm, round_to=8),
    "tp-16": partial(group_norm, round_to=16),
    "fisher": scored,
    "ablation-branches": partial(scored, how="ablation", gates=BRANCHES),
    "fisher-per-ms": partial(scored, per_ms=True),
    "fisher-macs-8": scored_in_macs,
}


def measure(way: str, model: nn.Module, share: float, job: Job) -> Row:
    """What comes of one way; ``model`` is left as it is."""
    folder = job.folder / "files"
    clock = Clock(model, job.example(), folder)
    cut = WAYS[way](copy.deepcopy(model), share, job, clock)
    row = cifar.figures(model, cut.model, job) | {"training": round(cut.spent, 2)}
    return row | {"time_share": round(clock.share(cut.model), 4), "files": str(folder)}


def timed_again(row: Row, path: Path) -> Row:
    """The row with a new time of its files, which is kept."""
    made = row | {"time_share": round(share_of(Path(row["files"])), 4)}
    append(path, made)
    return made


def main() -> None:
    more = {"time": ([0.5], "to be left"), "again": (False, "time the files of rows once more")}
    given = cifar.checked(__doc__, Some(WAYS), cifar.RUNS / "equal_time", **more)
    found = cifar.run(given, given.time, measure)
    if given.again:
        found = [timed_again(row, given.out.with_suffix(".jsonl")) for row in found]
    table(
        "network | way | seed | training, dense epochs | time | params | MACs | error | s",
        (
            (*cifar.cells(row, "time_share"), f"{row['macs_share']:.1%}", f"{row['error']:.2%}",
             f"{row['seconds']:,.0f}")
            for row in sorted(found, key=lambda row: (row["network"], -row["budget"], row["error"]))
        ),
    )  # fmt: skip
    cifar.print_means(found, "time_share")


if __name__ == "__main__":
    main()
