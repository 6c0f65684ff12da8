"""Ways to prune one network to a share of its MACs, all trained by the same loop.

Each takes a network that it may change and gives the cut one, trained for as many epochs as all
others, or for as many MACs. What they are and how they split them is in ``benchmarks.cifar``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import l0prune
from benchmarks import depgraph
from l0prune.data import Data
from l0prune.features.penalties import shrinkage
from l0prune.plan.switches import switches_of
from l0prune.selection.fit import LOOKS
from l0prune.selection.scores import TRIED
from l0prune.training import phases
from l0prune.training.start import ScoringBudget

SGD = {"optimizer": "sgd", "lr": 0.01, "weight_decay": 5e-4}
ADAM = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0}  # of networks without a convolution
BATCH = 128
SCORE_BATCHES = 100  # of an epoch of 50,000 examples; of a shorter one as large a part
SETTLE = 0.1  # of the epochs with gates: most of what settles is the small network, alone


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a way is given beside the network and its share of the MACs.

    Attributes:
        epochs: of a way, over all of its phases, unless ``training_macs`` says how many.
        training_macs: what all training of a way may cost, in epochs of the dense network.
        gate_epochs: of these with gates; None for half of what they cost.
        distill: how much of the loss is from the dense network, of all ways alike.
        teacher: that network, if it is more than nothing.
        folder: of this way's checkpoints, one for each phase.
    """

    data: Data
    epochs: int
    seed: int
    device: str
    autocast: str | None = None
    optimizer: Mapping[str, Any] = field(default_factory=lambda: SGD)
    training_macs: float | None = None
    gate_epochs: int | None = None
    distill: float = 0.0
    teacher: nn.Module | None = None
    folder: Path

    def settings(self, phase: str, epochs: int, **others: Any) -> dict[str, Any]:
        """Of training for one phase."""
        own = ("seed", "device", "autocast", "distill", "teacher")
        common = {"epochs": epochs, "batch_size": BATCH, "schedule": "cosine", "augment": True}
        common |= {name: getattr(self, name) for name in own} | dict(self.optimizer)
        common |= {"out": self.folder / phase, "resume": True, "progress": False}
        return common | others

    def example(self) -> Tensor:
        return self.data.train.example(2)

    def first(self, share: float = 1.0) -> int:
        """Epochs of the first of two phases: by default half of them, or of what they may cost.

        Args:
            share: of the MACs of the dense network, what one of them has, about.
        """
        if self.gate_epochs is not None:
            return self.gate_epochs
        if self.training_macs is None:
            return max(1, self.epochs // 2)
        return max(1, round(self.training_macs / 2 / self.cost(share)))

    def left(self, share: float, epochs: int = 0, spent: float = 0.0) -> int:
        """Epochs that are left for a network of this share of the MACs.

        Args:
            share: of the MACs of the dense network.
            epochs: that are done.
            spent: what they cost, in epochs of the dense network.
        """
        if self.training_macs is None:
            return self.epochs - epochs
        return max(1, round((self.training_macs - spent) / self.cost(share)))

    def cost(self, share: float) -> float:
        """Of an epoch of a network of this share, in epochs of the dense network.

        A step is three forwards, of which a teacher does one more, of the dense network.
        """
        return share + (1 / 3 if self.distill else 0.0)

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return math.ceil(len(self.data.train) / BATCH)

    @property
    def looks(self) -> dict[str, Any]:
        """How a score looks at the data."""
        part = min(1.0, len(self.data.train) / 50_000)
        batches = max(10, round(SCORE_BATCHES * part))
        drawn = {"batch_size": BATCH, "seed": self.seed, "device": self.device}
        return {"batches": batches, **drawn}

    @property
    def looked(self) -> float:
        """What that costs, in epochs of the dense network."""
        return float(self.looks["batches"]) / self.steps


@dataclass(frozen=True)
class Cut:
    """What a way gives.

    Attributes:
        model: the cut network, trained.
        spent: what all training and all looks at data cost, in epochs of the dense network.
    """

    model: nn.Module
    spent: float


def dense(model: nn.Module, share: float, job: Job) -> Cut:
    left = job.left(1.0)
    l0prune.train_dense(model, job.data, **job.settings("train", left))
    return Cut(model, left * job.cost(1.0))


def learned(
    model: nn.Module, share: float, job: Job, branches: bool | None = None, **others: Any
) -> Cut:
    l0prune.gate(model, (job.example(),), branches=branches)
    begins = 1.0 if others.get("start") == "alike" else _at_once(share)
    return with_gates(model, job, (begins + share) / 2, budget=f"macs={share}", **others)


def penalised(model: nn.Module, share: float, job: Job, penalty: str) -> Cut:
    """A penalty on the weights of slots in place of gates; from all slots, without a score."""
    l0prune.gate(model, (job.example(),), branches=False)
    return with_gates(model, job, (1.0 + share) / 2, budget=f"macs={share}", penalty=penalty)


def _at_once(share: float) -> float:
    """Half of the way to a share of the MACs, which goes before gates learn."""
    return share**0.5


def alone(model: nn.Module, share: float, job: Job) -> Cut:
    """One run of ``finetune`` with its own defaults, and nothing after it."""
    l0prune.gate(model, (job.example(),))
    # Most of what learns is cut near the end of learning.
    epochs = job.left((1 - phases.SETTLE) * _at_once(share) + phases.SETTLE * share)
    looked = _looked(model, (1 - phases.SETTLE) * epochs, job)
    settings = job.settings("finetune", epochs, schedule="settle", budget=f"macs={share}")
    run = l0prune.finetune(model, job.data, **settings)
    spent = epochs * job.cost(run.records[-1]["training_macs"]) + looked
    return Cut(l0prune.export(model).module, spent)


def with_gates(model: nn.Module, job: Job, share: float = 1.0, **settings: Any) -> Cut:
    """Epochs with gates, of about this share of the MACs, and the rest for what is left."""
    first = job.first(share)
    whole = macs(model, job.example())
    settings |= {"settle": SETTLE * first, "schedule": "settle"}
    how = job.settings("finetune", first, **settings)
    if settings.get("penalty") == "gsm":  # whose decay goes by the steps that it has
        del how["weight_decay"]
    run = l0prune.finetune(model, job.data, **how)
    is_leaned = settings.get("start", "auto") != "alike" and "penalty" not in settings
    looked = _looked(model, (1 - SETTLE) * first, job) if is_leaned else 0.0
    spent = first * job.cost(run.records[-1]["training_macs"]) + looked
    return trained(l0prune.export(model).module, whole, job, first, spent)


def branches_of(model: nn.Module) -> int:
    """How many branches of a gated model can go."""
    return int(switches_of(l0prune.gates(model).plan).sum())


def _looked(model: nn.Module, learning: float, job: Job) -> float:
    """What scores, and what goes at once by them, cost before gates learn, in dense epochs.

    Args:
        learning: epochs in which they learn.
    """
    switches = branches_of(model)
    return (
        ScoringBudget.of(round(learning * job.steps), BATCH, switches).steps(BATCH, switches)
        / job.steps
    )


def trained(small: nn.Module, whole: int, job: Job, done: int = 0, spent: float = 0.0) -> Cut:
    """The cut network trained for what is left.

    Args:
        small: the network.
        whole: MACs of the dense one.
        job: says how much is left after ``done`` epochs that cost ``spent``.
    """
    share = macs(small, job.example()) / whole
    left = job.left(share, done, spent)
    l0prune.train_dense(small, job.data, **job.settings("train", left))
    return Cut(small, spent + left * job.cost(share))


def scored(model: nn.Module, share: float, job: Job, how: str) -> Cut:
    is_auto = how == "auto"
    l0prune.gate(model, (job.example(),), branches=None if is_auto else False)
    scores = l0prune.score(model, how, job.data, **job.looks)
    l0prune.fit(model, f"macs={share}", scores, data=job.data if is_auto else None)
    looked = job.looked if how in ("taylor", "fisher", "outputs") else 0.0
    if is_auto:
        scoring_budget = ScoringBudget(job.looks["batches"], *TRIED, LOOKS[0])
        switches = branches_of(model)
        looked = scoring_budget.steps(BATCH, switches) / job.steps
    left = job.left(share, spent=looked)
    l0prune.finetune(model, job.data, **job.settings("finetune", left, learn=False))
    return Cut(l0prune.export(model).module, left * job.cost(share) + looked)


def group_norm(model: nn.Module, share: float, job: Job, uniform: bool = False) -> Cut:
    pruner = depgraph.pruner(model, job.example(), classifier(model), uniform=uniform)
    return _cut_and_trained(pruner, model, share, job)


def group_sl(model: nn.Module, share: float, job: Job) -> Cut:
    pruner = depgraph.pruner(model, job.example(), classifier(model), sparse=True)
    optimizer = depgraph.sparse_sgd(pruner, model, job.optimizer["lr"])
    first = job.first()
    settings = job.settings("sparse", first, optimizer=optimizer, weight_decay=0.0)
    l0prune.train_dense(model, job.data, **settings)
    spent = first * job.cost(1.0)
    return _cut_and_trained(pruner, model, share, job, first, spent)


def _cut_and_trained(
    pruner: Any, model: nn.Module, share: float, job: Job, done: int = 0, spent: float = 0.0
) -> Cut:
    count = partial(macs, example=job.example())
    whole = count(model)
    depgraph.shrink(pruner, model, count, share * whole)
    model.zero_grad()
    return trained(model, whole, job, done, spent)


def classifier(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


Way = Callable[[nn.Module, float, Job], Cut]
WAYS: dict[str, Way] = {
    "dense": dense,
    "l0prune": learned,
    "l0prune-any": partial(learned, round_to=1),
    "l0prune-alone": alone,
    "l0prune-widths": partial(learned, branches=False),
    "l0prune-alike": partial(learned, branches=False, start="alike"),
    "l0prune-at-once": partial(scored, how="auto"),
    "tp-group-norm": group_norm,
    "tp-group-norm-uniform": partial(group_norm, uniform=True),
    "tp-group-sl": group_sl,
    "group-magnitude": partial(scored, how="group-magnitude"),
    "taylor": partial(scored, how="taylor"),
}
SCORES = ("magnitude", "bn-scale", "fisher", "random")
PENALTIES = tuple(shrinkage.PENALTIES)
ALL_WAYS = {
    **WAYS,
    **{how: partial(scored, how=how) for how in SCORES},
    **{name: partial(penalised, penalty=name) for name in PENALTIES},
}


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates for one example."""
    was_training, fast = model.training, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not see into it
    # Nor, up to torch 2.14, into attention on a CPU unless that is two products of matrices.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.eval()(example)
    torch.backends.mha.set_fastpath_enabled(fast)
    model.train(was_training)
    return counter.get_total_flops() // (2 * len(example))
