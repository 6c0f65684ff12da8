"""Callbacks for the training loops of other packages, in a module named after each package."""

from __future__ import annotations

from torch import nn

from l0prune.errors import UsageError
from l0prune.training.pruner import Pruner


def check_belongs(pruner: Pruner, model: nn.Module, steps: int | float) -> None:
    """Refuse a model that does not contain the pruner's model, and a run of another length."""
    if not any(module is pruner.model for module in model.modules()):
        raise UsageError(
            "the model in training is not the one that this L0Callback prunes: train the gated "
            "model that its Pruner was made with"
        )
    if steps != pruner.phases.total:
        raise UsageError(
            f"this run does {steps} optimizer steps, and the Pruner is for {pruner.phases.total}: "
            f"make it with steps={steps}"
        )
