"""One batch through model and loss, before anything is computed that takes long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from l0prune.capture.modes import evaluating
from l0prune.errors import DataError, L0pruneError, UsageError
from l0prune.running.device import precision
from l0prune.running.feed import Feed, call


def check_first_batch(
    model: nn.Module, feed: Feed, device: torch.device, autocast: str | None
) -> float:
    """One batch through model and loss, so that what does not fit is known before training.

    Returns:
        The loss, in eval mode.

    Raises:
        DataError: model, data and loss do not fit together.
    """
    batch = next(feed.train(0, device), None)
    if batch is None:
        raise DataError("the training data is empty")
    inputs, targets = batch.inputs, batch.targets
    try:
        with evaluating(model), precision(device, autocast):
            loss = feed.task.loss(call(model, inputs), targets)
    except L0pruneError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"model, data and loss do not fit together. Inputs are {_shapes(inputs)}, targets "
            f"{_shapes(targets)}; what went wrong: {error}"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise UsageError(
            f"the loss must be one number, a scalar tensor; it is {_shapes(loss)}. "
            "Take its mean over the batch"
        )
    return float(loss)


def _shapes(part: Any) -> str:
    """A batch's part for people: shapes and types."""
    if isinstance(part, torch.Tensor):
        return f"{tuple(part.shape)} of {str(part.dtype).removeprefix('torch.')}"
    if isinstance(part, (tuple, list)):
        return f"({', '.join(map(_shapes, part))})"
    if isinstance(part, Mapping):
        return ", ".join(f"{key}: {_shapes(value)}" for key, value in part.items())
    return type(part).__name__
