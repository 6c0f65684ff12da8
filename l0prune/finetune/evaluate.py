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
    lengths: list[int] = []
    with evaluating(model), precision(device, autocast):
        for inputs, targets in batches:
            outputs = call(model, inputs)
            losses.append(task.loss(outputs, targets).float().mean())
            metrics.append(task.metric(outputs, targets).float().mean())
            lengths.append(batch_length(inputs, targets))
            between()
    if not lengths:
        raise DataError("the test data is empty")
    return {
        "test_loss": _weighted_mean(losses, lengths),
        task.metric_name: _weighted_mean(metrics, lengths),
    }


def _weighted_mean(values: list[Tensor], weights: list[int]) -> float:
    """In float64 on the CPU, after one transfer."""
    each = torch.tensor(weights, dtype=torch.float64)
    return ((torch.stack(values).cpu().double() * each).sum() / each.sum()).item()
