"""Optimizers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from l0prune.errors import UsageError
from l0prune.finetune.phases import Phases
from l0prune.finetune.settings import Settings

Groups = list[dict[str, Any]]


def make_optimizer(settings: Settings, groups: Groups) -> Optimizer:
    """The optimizer that the settings name, over these parameter groups.

    Raises:
        UsageError: nothing is left to learn.
    """
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise UsageError("nothing of this model learns: all its parameters are frozen")
    if callable(settings.optimizer):
        return settings.optimizer(groups)
    # One kernel for all tensors of a group, where their device and dtype have one.
    fused = all(_can_fuse(p) for group in groups for p in group["params"])
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=0.9, fused=fused)
    kind = Adam if settings.optimizer == "adam" else AdamW
    return kind(groups, lr=settings.lr, fused=fused)


def _can_fuse(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")


class Schedule:
    """Sets every group's learning rate from the fraction of the steps that are done."""

    def __init__(self, settings: Settings, optimizer: Optimizer, phases: Phases) -> None:
        self._factor = _factor(settings.schedule, 1 - phases.settle / phases.total)
        self._optimizer = optimizer
        self._total = phases.total
        self._base = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """The rates of step number ``step``, from 0."""
        factor = self._factor(step / self._total)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor


def _factor(schedule: str | Callable[[float], float], pruned: float) -> Callable[[float], float]:
    """From the fraction of the steps done to a factor; pruning ends at fraction ``pruned``."""
    if callable(schedule):
        return schedule
    if schedule == "constant":
        return lambda done: 1.0
    start = pruned if schedule == "settle" else 0.0
    return lambda done: _cosine((done - start) / (1 - start)) if done > start else 1.0


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
