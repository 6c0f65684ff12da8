"""Torch-Pruning's group pruner (DepGraph, Fang et al. 2023), with the settings of its authors.

They are those of ``reproduce/main.py`` and of the commands for ResNet-56 on CIFAR-10 in
``reproduce/readme.md`` of its repository:

- ``group_norm``: ``GroupMagnitudeImportance(p=2)``, no sparse training;
- ``group_sl``: the same normalised by the group's largest (``normalizer="max"``), and sparsity
  learning before with ``--reg 5e-4``, in which the regularizer takes the place of weight decay;
- for both ``--global-pruning``, ``--iterative-steps 400`` with ``pruning_ratio=1.0``, of which as
  many are done as it takes to come down to the wanted count, ``max_pruning_ratio=1.0``, and the
  classifier ignored.

Both phases of training are 100 epochs there, at batch 128, SGD with momentum 0.9, rate 0.01 and a
tenth of it after 60 and after 80 epochs, weight decay 5e-4; the best epoch by test accuracy is
kept. What of that a comparison follows is its own decision (``benchmarks.cifar``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

STEPS = 400
REG = 5e-4


def pruner(
    model: nn.Module,
    example: Tensor,
    classifier: nn.Module,
    *,
    sparse: bool = False,
    uniform: bool = False,
    round_to: int | None = None,
) -> Any:
    """A pruner of its kind for ``model``; ``sparse`` for sparsity learning.

    With ``round_to`` channels that are left are multiples of it.
    With ``uniform`` all layers lose the same share, against the authors' recommendation: their one
    ranking over all layers can leave a layer nearly nothing.
    """
    import torch_pruning as tp

    model.eval()
    normalised = {"normalizer": "max"} if sparse else {}
    importance = tp.importance.GroupMagnitudeImportance(p=2, **normalised)
    return tp.pruner.GroupNormPruner(
        model, example, importance=importance, reg=REG, global_pruning=not uniform,
        pruning_ratio=1.0, max_pruning_ratio=1.0, iterative_steps=STEPS,
        ignored_layers=[classifier], round_to=round_to,
    )  # fmt: skip


def sparse_sgd(pruner: Any, model: nn.Module, lr: float) -> Callable[[list[dict]], SGD]:
    """What makes the optimizer of sparsity learning: gradients get the regularizer's before a step.

    The README has it like this: ``pruner.regularize(model)`` between backward and step.
    """
    pruner.update_regularizer()

    def make(groups: list[dict]) -> SGD:
        optimizer = SGD(groups, lr=lr, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: pruner.regularize(model))
        return optimizer

    return make


class Unreached(RuntimeError):
    """Torch-Pruning does not prune as far as it was asked to."""


def shrink(pruner: Any, model: nn.Module, count: Callable[[nn.Module], int], most: float) -> None:
    """Prune in small steps, in place, until ``count(model)`` is no more than ``most``.

    Raises:
        Unreached: it never is.
    """
    model.eval()
    for _ in range(STEPS):
        if count(model) <= most:
            return
        with torch.enable_grad():
            pruner.step()
        if hasattr(model, "hidden_dim"):
            model.hidden_dim = model.conv_proj.out_channels  # as its example of a ViT does
    raise Unreached(f"after {STEPS} steps {count(model):,} are left, not {most:,.0f}")
