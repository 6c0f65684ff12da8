"""How well a model does its task: eval mode, deterministic gates, the test data once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import DataError
from l0prune.finetune.device import at_home_again, choose, evaluating, precision
from l0prune.finetune.feed import call, test_batches
from l0prune.finetune.task import Task, batch_length


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int = 100,
    device: str | torch.device = "auto",
    autocast: str | None = None,
) -> dict[str, float]:
    """Test loss and metric of any model, gated or not.

    Args:
        model: left as it was found, its mode included.
        data: a data source or a ``Task``, as for ``finetune``.
        batch_size: examples at a time, where the source lets us choose.
        device: see ``Settings``.
        autocast: see ``Settings``.

    Returns:
        ``test_loss``, the mean over the examples, and the task's metric under its name, by
        default ``error``: the fraction of wrong answers.

    Raises:
        DataError: there is no test data.
        UsageError: there is no such device.
    """
    task = Task.of(data)
    if task.test is None:
        raise DataError("this data has no test part; give a Task(…, test=…) or (training, test)")
    place = choose(device, model)
    with at_home_again(model, place):
        batches = test_batches(task, batch_size, place)
        return measure(model, batches, task, place, autocast)


def measure(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    task: Task,
    device: torch.device,
    autocast: str | None = None,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss and metric over ``batches``; ``between`` is called after each and may raise."""
    losses: list[Tensor] = []
    metrics: list[Tensor] = []
    count = 0
    with evaluating(model), precision(device, autocast):
        for inputs, targets in batches:
            outputs = call(model, inputs)
            length = batch_length(inputs, targets)
            losses.append(_total(task.loss(outputs, targets), length))
            metrics.append(_total(task.metric(outputs, targets), length))
            count += length
            between()
    if not count:
        raise DataError("the test data is empty")
    return {"test_loss": _sum(losses) / count, task.metric_name: _sum(metrics) / count}


def _total(value: Tensor, examples: int) -> Tensor:
    """The sum over a batch, of one number per example or from their mean."""
    return value.float().sum() * (examples / value.numel())


def _sum(values: list[Tensor]) -> float:
    """In float64 on the CPU, after one transfer."""
    return float(torch.stack(values).cpu().double().sum())
