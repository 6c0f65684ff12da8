"""Freezing of weights and norm statistics while only the gates of a network learn."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from l0prune.capture.compat import NormBase
from l0prune.errors import warn
from l0prune.gating.attaching import weights_of


def report_frozen(model: nn.Module, say: Callable[[str], None] = warn) -> None:
    """Warn if weights are to learn beside the gates, and all of them are frozen."""
    weights = weights_of(model).values()
    if not any(weight.requires_grad for weight in weights):
        say(
            "all weights of this model are frozen (requires_grad is False), as those of a "
            "checkpoint for inference often are: only its gates learn, and no weight makes up for "
            "what they close. Call model.requires_grad_(True) before, to train the weights, too; "
            "give learn='gates' if they are to stay as they are"
        )


class Standing:
    """Frozen weights, and norms in eval mode, of a model whose gates learn.

    ``model.train()`` leaves these norms in eval mode. ``release`` restores both.

    Args:
        model: with gates, which go on learning.
        loss: a loss with parameters, which are frozen, too.
    """

    def __init__(self, model: nn.Module, loss: nn.Module | None = None) -> None:
        parameters = [*weights_of(model).values(), *([] if loss is None else loss.parameters())]
        self._model = model
        self._weights = [each for each in parameters if each.requires_grad]
        kept = [m for m in model.modules() if isinstance(m, NormBase) and m.track_running_stats]
        self._norms = [(norm, norm.training) for norm in kept if "train" not in vars(norm)]
        for parameter in self._weights:
            parameter.requires_grad_(False)
        for norm, _ in self._norms:
            norm.eval()
            norm.train = _stay  # type: ignore[assignment]  # which model.train() calls

    def release(self) -> None:
        """Unfreeze weights and statistics."""
        for parameter in self._weights:
            parameter.requires_grad_(True)
        for norm, mode in self._norms:
            del norm.train
            norm.train(mode and self._model.training)
        self._weights, self._norms = [], []


def _stay(mode: bool = True) -> None:
    """Leave a norm in eval mode."""
