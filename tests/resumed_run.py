"""A run that can be stopped at a step, in the middle of an epoch."""

import os
import random
import signal

import torch
from small_task import CLASSES, clouds, gated
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from l0prune.data import Data
from l0prune.running.task import Task, error_rate
from l0prune.training.run import finetune

EPOCHS, STEPS = 5, 8  # warm-up ends within epoch 1, settling begins within epoch 4
SETTINGS = {
    "epochs": EPOCHS, "batch_size": 30, "warmup": 0.5, "settle": 1.5, "lam": "2/N", "l2": 1e-3,
    "gate_lr": 0.4, "clip": 1.0, "schedule": "cosine", "progress": False,
}  # fmt: skip

# What has a state of its own: multipliers, a second optimizer, a teacher.
BUDGET = {
    "lam": None, "budget": "params=0.6, 0: macs=0.7", "optimizer": "sgd", "lr": 0.05,
    "distill": 0.5, "match": "2",
}  # fmt: skip


class Shaken(Dataset):
    """Examples with noise from the generators of Python and torch, as augmentation draws it."""

    def __init__(self):
        self.split = clouds()

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(self.split.inputs.shape[1]) + random.gauss(0, 0.1)
        return self.split.inputs[index] + noise, self.split.targets[index]


def source(kind):
    if kind in ("split", "budget"):
        return clouds()
    generator = torch.Generator().manual_seed(11) if kind == "own generator" else None
    return DataLoader(Shaken(), batch_size=30, shuffle=True, generator=generator)


def task(kind, stop=None, number=signal.SIGKILL, *, testing=False):
    """The task; before step ``stop`` (or the first test batch after it) comes signal ``number``."""
    # First a score looks at the data, after two looks at how the loss changes.
    done = -(STEPS + 2) if kind == "budget" else 0

    def loss(outputs, targets):
        nonlocal done
        if torch.is_grad_enabled():
            done += 1
        if stop is not None and done == stop + 1 - testing and torch.is_grad_enabled() != testing:
            os.kill(os.getpid(), number)
        return cross_entropy(outputs, targets)

    test = Data("clouds", clouds(), clouds(120, seed=1), CLASSES).test
    return Task(source(kind), test, loss=loss, metric=error_rate)


def run(folder, kind="split", *stop, resume=False, testing=False):
    model = gated(dropout=0.3)
    settings = {**SETTINGS, **(BUDGET if kind == "budget" else {})}
    history = finetune(
        model, task(kind, *stop, testing=testing), out=folder, resume=resume, **settings
    )
    return model, history
