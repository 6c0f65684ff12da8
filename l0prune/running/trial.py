"""One batch through model, loss and metric, before anything is computed that takes long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from l0prune.capture.modes import evaluating
from l0prune.errors import DataError, L0pruneError
from l0prune.running.batch import Batch
from l0prune.running.calling import call
from l0prune.running.criteria import shapes
from l0prune.running.device import precision
from l0prune.running.feed import Feed, test_batches

WHAT = "model, test data, loss and metric"


def check_first_batch(
    model: nn.Module, feed: Feed, device: torch.device, autocast: str | None
) -> float | None:
    """One training batch through model and loss, so that what does not fit is known before.

    Returns:
        The loss, in eval mode; None where the model has none then.

    Raises:
        DataError: model, data and loss do not fit together.
        UsageError: the loss is no number.
    """
    batch = next(feed.train(0, device), None)
    if batch is None:
        raise DataError("the training data is empty")
    with fitting([batch], "model, data and loss"), evaluating(model), precision(device, autocast):
        loss = feed.task.loss_in(call(model, batch.inputs), batch.targets)
    return None if loss is None else float(loss)


def check_first_test(
    model: nn.Module, feed: Feed, device: torch.device, autocast: str | None
) -> None:
    """Check the first test batch, if there is one, with the metric.

    Raises:
        DataError: model, test data, loss and metric do not fit together.
        UsageError: the loss or the metric is no number.
    """
    for batch in islice(test_batches(feed.task, feed.batch_size, device, feed.part), 1):
        with fitting([batch], WHAT), evaluating(model), precision(device, autocast):
            feed.task.judged(call(model, batch.inputs), batch.targets)


@contextmanager
def fitting(batches: Sequence[Batch], what: str) -> Iterator[None]:
    """Convert errors within the context, which the last of these batches made, into messages."""
    try:
        yield
    except (L0pruneError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        if not batches:
            raise
        batch = batches[-1]
        hint = ""
        if isinstance(batch.targets, Tensor) and not batch.targets.ndim:
            hint = (
                " These targets are of a single example: a list holds batches. Give examples as "
                "DataLoader(examples, batch_size)."
            )
        raise DataError(
            f"{what} do not fit together. Inputs are {shapes(batch.inputs)}, targets "
            f"{shapes(batch.targets)}; what went wrong: {type(error).__name__}: {error}.{hint}"
        ) from error
