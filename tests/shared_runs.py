"""Runs that come out the same in one process and in several: in float64, with steady gates."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from small_task import FEATURES, clouds, network, tensors
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import l0prune
from l0prune.data import Loaded, Tensors
from l0prune.doors import features
from l0prune.gating.kinds.base import register
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.running.task import Task
from l0prune.training.run import finetune

COMMON = {
    "epochs": 3, "batch_size": 30, "warmup": 0.5, "settle": 1, "lam": "1/N", "gate_lr": 0.2,
    "lr": 1e-2, "progress": False, "device": "cpu",
}  # fmt: skip


@register
@dataclass(frozen=True)
class Steady(HardConcrete):
    """A gate whose every sample is drawn with the same noise, so that processes agree."""

    name: ClassVar[str] = "steady"

    def sample(self, log_alpha, noise):
        return super().sample(log_alpha, torch.full_like(noise, 0.4))


class Block(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu())


class Residual(nn.Module):
    """Blocks, bare numbers, a tied weight, and a layer that the loss never sees."""

    def __init__(self, norm=False):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(4))
        self.blocks[3].up.weight = self.blocks[2].up.weight
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.full((1, 1, 8), 0.1))
        self.aside = nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x) + self.shift[0]
        for block in self.blocks:
            x = x + block(x)
        return {"scores": self.last(x) * self.scale, "aside": self.aside(x)}


def gated(model, **how):
    example = torch.zeros(2, FEATURES, dtype=torch.float64)
    return l0prune.gate(model.double(), example, gate=Steady(), open_probability=0.9, **how)


def mlp():
    return gated(network(norm=False))


def residual(norm=False):
    torch.manual_seed(3)
    return gated(Residual(norm))


def branched():
    """Of four branches two are closed for good, one of them with a weight that is another's too."""
    torch.manual_seed(3)
    model = gated(Residual(), branches=True)
    bank = l0prune.gates(model)
    with torch.no_grad():
        for axis in bank.axes:
            if axis.name in ("blocks.1", "blocks.3"):
                bank.log_alpha[axis.slice] = -9.0
    return model


def doubled(examples=240, seed=0):
    split = clouds(examples, seed)
    return Tensors(split.inputs.double(), split.targets)


class OneByOne(Dataset):
    """Examples that are read one by one, and who read which."""

    def __init__(self, examples=240):
        self.split, self.read = doubled(examples), []

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        self.read.append(index)
        return self.split.inputs[index], self.split.targets[index]


def loss(outputs, targets):
    return cross_entropy(outputs["scores"] if isinstance(outputs, dict) else outputs, targets)


def task(train):
    return Task(train, doubled(121, seed=1), loss, loss, "test")


# name: model, training data, settings
RUNS = {
    "adam": (mlp, doubled, {"l2": 1e-2, "clip": 0.1}),
    "sgd": (mlp, doubled, {"optimizer": "sgd", "weight_decay": 0.1}),
    "own batches": (mlp, lambda: list(doubled().batches(31)), {"accumulate": 2}),
    "read one by one": (mlp, lambda: Loaded(OneByOne()), {"accumulate": 3}),
    "less than all": (mlp, lambda: doubled(3), {"accumulate": 2}),
    "residual": (residual, doubled, {"l2": 1e-2, "weight_decay": 0.1, "optimizer": "adamw"}),
    "checkpointed": (residual, doubled, {"checkpointing": True, "accumulate": 2}),
    "compiled": (residual, doubled, {"compile": "eager", "epochs": 2, "settle": 0}),
    "compiled further": (residual, doubled, {"compile": "aot_eager", "epochs": 2, "settle": 0}),
    "budget": (mlp, doubled, {"lam": None, "budget": "params=0.5", "gate_lr": None, "epochs": 6}),
    "branches": (
        branched, doubled, {"lam": None, "budget": "params=0.4", "gate_lr": None, "epochs": 6},
    ),
    "in eight bits": (mlp, doubled, {"quantize": "int8", "settle": 1.5}),
    "distilled": (mlp, doubled, {"distill": 0.5, "optimizer": "sgd"}),
}  # fmt: skip
for of, feature in {"in eight bits": "int8", "distilled": "distillation"}.items():
    if feature not in features():
        del RUNS[of]


def outcome(name, **settings):
    """Tensors, records, and the parameters' identities kept."""
    make, source, own = RUNS[name]
    model = make()
    before = [id(p) for p in model.parameters()]
    history = finetune(model, task(source()), **{**COMMON, **own, **settings})
    assert before == [id(p) for p in model.parameters()]
    assert not any(hasattr(p, "placements") or p.grad is not None for p in model.parameters())
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in history.records]
    return tensors(model), records
