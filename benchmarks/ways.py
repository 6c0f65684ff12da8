"""Ways to prune one network to a share of its MACs, all trained by the same loop.

Each takes a network that it may change and gives the cut one, trained for as many epochs as all
others. What they are and how they split their epochs is in ``benchmarks.cifar``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import l0prune
from benchmarks import depgraph
from l0prune.data import Data

RATE = 0.01
WEIGHT_DECAY = 5e-4
SCORE_BATCHES = 100
SETTLE = 0.1  # of the epochs with gates: most of what settles is the small network, alone


def _steps(done: float) -> float:
    """Torch-Pruning's milestones 60 and 80 of 100 epochs."""
    return 0.1 ** ((done >= 0.6) + (done >= 0.8))


SCHEDULES: dict[str, Any] = {"cosine": "cosine", "steps": _steps}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a way is given beside the network and its share of the MACs.

    Attributes:
        folder: of this way's checkpoints, one for each phase.
    """

    data: Data
    epochs: int
    schedule: str
    seed: int
    device: str
    autocast: str | None = None
    folder: Path

    def settings(self, phase: str, epochs: int, **others: Any) -> dict[str, Any]:
        """Of training for one phase."""
        common = {
            "epochs": epochs,
            "batch_size": 128,
            "optimizer": "sgd",
            "lr": RATE,
            "weight_decay": WEIGHT_DECAY,
            "schedule": SCHEDULES[self.schedule],
            "augment": True,
            "seed": self.seed,
            "device": self.device,
            "autocast": self.autocast,
            "out": self.folder / phase,
            "resume": True,
            "progress": False,
        }
        return common | others

    def example(self) -> Tensor:
        return self.data.train.example(2)


def dense(model: nn.Module, share: float, job: Job) -> nn.Module:
    l0prune.train_dense(model, job.data, **job.settings("train", job.epochs))
    return model


def learned(model: nn.Module, share: float, job: Job, distill: float = 0.0) -> nn.Module:
    first = job.epochs // 2
    teacher = copy.deepcopy(model) if distill else None
    taught = {"distill": distill, "teacher": teacher}
    l0prune.gate(model, (job.example(),))
    gates = {"budget": f"macs={share}", "settle": SETTLE * first, "schedule": "settle"}
    l0prune.finetune(model, job.data, **job.settings("finetune", first, **gates, **taught))
    small = l0prune.export(model).module
    l0prune.train_dense(small, job.data, **job.settings("train", job.epochs - first, **taught))
    return small


def scored(model: nn.Module, share: float, job: Job, how: str) -> nn.Module:
    l0prune.gate(model, (job.example(),))
    drawn = {"batches": SCORE_BATCHES, "batch_size": 128, "seed": job.seed, "device": job.device}
    l0prune.fit(model, f"macs={share}", l0prune.score(model, how, job.data, **drawn))
    l0prune.finetune(model, job.data, **job.settings("finetune", job.epochs, learn=False))
    return l0prune.export(model).module


def group_norm(model: nn.Module, share: float, job: Job, uniform: bool = False) -> nn.Module:
    pruner = depgraph.pruner(model, job.example(), classifier(model), uniform=uniform)
    return _cut_and_trained(pruner, model, share, job, job.epochs)


def group_sl(model: nn.Module, share: float, job: Job) -> nn.Module:
    first = job.epochs // 2
    pruner = depgraph.pruner(model, job.example(), classifier(model), sparse=True)
    optimizer = depgraph.sparse_sgd(pruner, model, RATE)
    settings = job.settings("sparse", first, optimizer=optimizer, weight_decay=0.0)
    l0prune.train_dense(model, job.data, **settings)
    return _cut_and_trained(pruner, model, share, job, job.epochs - first)


def _cut_and_trained(pruner: Any, model: nn.Module, share: float, job: Job, left: int) -> nn.Module:
    count = partial(macs, example=job.example())
    depgraph.shrink(pruner, model, count, share * count(model))
    model.zero_grad()
    l0prune.train_dense(model, job.data, **job.settings("train", left))
    return model


def classifier(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


Way = Callable[[nn.Module, float, Job], nn.Module]
WAYS: dict[str, Way] = {
    "dense": dense,
    "l0prune": learned,
    "l0prune-distill": partial(learned, distill=0.5),
    "tp-group-norm": group_norm,
    "tp-group-norm-uniform": partial(group_norm, uniform=True),
    "tp-group-sl": group_sl,
    "group-magnitude": partial(scored, how="group-magnitude"),
    "taylor": partial(scored, how="taylor"),
}
SCORES = ("magnitude", "bn-scale", "fisher", "random")
ALL_WAYS = WAYS | {how: partial(scored, how=how) for how in SCORES}


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates for one example."""
    was_training = model.training
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(example)
    model.train(was_training)
    return counter.get_total_flops() // (2 * len(example))
