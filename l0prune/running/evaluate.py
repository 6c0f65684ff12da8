"""How well a model does its task: eval mode, deterministic gates, the test data once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.modes import evaluating
from l0prune.data.dataset import WHOLE
from l0prune.errors import DataError
from l0prune.running.batch import Batch
from l0prune.running.device import choose, on_device, precision
from l0prune.running.feed import call, test_batches
from l0prune.running.processes import ALONE, World
from l0prune.running.task import Task


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
        ``test_loss``, the mean over the examples, and the task's metric under its name (see
        ``Task``): ``error``, the fraction of wrong answers, or ``loss`` for a task with a loss of
        its own.

    Raises:
        DataError: there is no test data.
        UsageError: there is no such device.
    """
    task = Task.of(data)
    if task.test is None:
        raise DataError("this data has no test part; give a Task(…, test=…) or (training, test)")
    place = choose(device, model)
    with on_device(model, place):
        batches = test_batches(task, batch_size, place, WHOLE)
        return measure(model, batches, task, place, autocast)


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    device: torch.device,
    autocast: str | None = None,
    between: Callable[[], None] = lambda: None,
    world: World = ALONE,
) -> dict[str, float]:
    """Loss and metric over the ``batches`` of all processes, the same in each of them.

    ``between`` is called after each batch and may raise.
    """
    losses: list[Tensor] = []
    metrics: list[Tensor] = []
    count = 0
    with evaluating(model), precision(device, autocast):
        for batch in batches:
            outputs = call(model, batch.inputs)
            judged = task.judged(outputs, batch.targets)
            loss_here, metric_here = (_total(value, batch.examples) for value in judged)
            losses.append(loss_here)
            metrics.append(metric_here)
            count += batch.examples
            between()
    loss, metric, examples = world.total([_sum(losses), _sum(metrics), count])
    if not examples:
        raise DataError("the test data is empty")
    return {"test_loss": loss / examples, task.metric_name: metric / examples}


def _total(value: Tensor, examples: int) -> Tensor:
    """The sum over a batch, of one number per example or from their mean."""
    return value.float().sum() * (examples / value.numel())


def _sum(values: list[Tensor]) -> float:
    """In float64 on the CPU, after one transfer."""
    return float(torch.stack(values).cpu().double().sum()) if values else 0.0
