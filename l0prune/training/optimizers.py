"""Optimizers and learning rates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from l0prune.errors import UsageError
from l0prune.running.shards import is_sharded
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings

Groups = list[dict[str, Any]]


def make_optimizers(settings: Settings, groups: Groups) -> list[Optimizer]:
    """The optimizer that the settings name, over these parameter groups; Adam for gates beside SGD.

    Raises:
        UsageError: nothing is left to learn, or the user's function made none for this loop.
    """
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise UsageError("nothing of this model learns: all its parameters are frozen")
    if callable(settings.optimizer):
        return [_stepping(settings.optimizer(groups))]
    # One kernel for all tensors of a group, where their device and dtype have one.
    parameters = [p for group in groups for p in group["params"]]
    fused = all(map(_can_fuse, parameters))
    if settings.optimizer != "sgd":
        kind = Adam if settings.optimizer == "adam" else AdamW
        return [kind(groups, lr=settings.lr, fused=fused)]
    weights = [group for group in groups if group.get("name") != "gates"]
    gates = [group for group in groups if group.get("name") == "gates"]
    made: list[Optimizer] = []
    if weights:
        # Torch's fused SGD has no way with shards yet.
        fuses = fused and not any(map(is_sharded, parameters))
        made.append(SGD(weights, lr=settings.lr, momentum=settings.momentum, fused=fuses))
    if gates:
        made.append(Adam(gates, fused=fused))
    return made


def _stepping(made: Any) -> Optimizer:
    """What a user's function made, if it can take a step by itself."""
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer made a {type(made).__name__}, not a torch.optim.Optimizer; it gets the "
            "parameter groups: optimizer=lambda groups: torch.optim.RAdam(groups)"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{type(made).__name__} computes the loss several times in a step, which this loop "
            "does not: take another optimizer, or write a loop of your own with l0prune.penalty"
        )
    return made


def _can_fuse(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")


class Schedule:
    """Sets the weights' rate from the fraction of the steps that are done; that of gates stays."""

    def __init__(self, settings: Settings, optimizers: list[Optimizer], phases: Phases) -> None:
        self._factor = _factor(settings.schedule, 1 - phases.settle / phases.total)
        self._optimizers = optimizers
        self._total = phases.total
        self._base = [group["lr"] for group in self._groups()]

    def _groups(self) -> Groups:
        """As they are now: an optimizer that loads a state puts new ones in their places."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """The rates of step number ``step``, from 0."""
        factor = self._factor(step / self._total)
        for group, base in zip(self._groups(), self._base, strict=True):
            group["lr"] = base if group.get("name") == "gates" else base * factor


def _factor(schedule: str | Callable[[float], float], pruned: float) -> Callable[[float], float]:
    """From the fraction of the steps done to a factor; pruning ends at fraction ``pruned``."""
    if callable(schedule):
        return schedule
    if schedule == "constant":
        return lambda done: 1.0
    if schedule == "step":
        return lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75))
    start = pruned if schedule == "settle" else 0.0
    return lambda done: _cosine((done - start) / (1 - start)) if done > start else 1.0


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
