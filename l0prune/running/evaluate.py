"""Evaluation: eval mode, deterministic gates, the test data once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.modes import evaluating
from l0prune.data.dataset import WHOLE
from l0prune.errors import DataError
from l0prune.plan.numbers import check_whole
from l0prune.running.batch import Batch
from l0prune.running.calling import call
from l0prune.running.criteria import Loss, Metric
from l0prune.running.device import choose, on_device, precision
from l0prune.running.feed import test_batches
from l0prune.running.processes import ALONE, World
from l0prune.running.task import Task
from l0prune.running.trial import WHAT, fitting


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    loss: Loss | str | None = None,
    metric: Metric | str | None = None,
    batch_size: int = 100,
    device: str | torch.device = "auto",
    autocast: str | None = None,
) -> dict[str, float]:
    """Test loss and metric of any model, gated or not.

    Args:
        model: left as it was found, its mode included.
        data: a data source, (training, test) or a ``Task``, as for ``finetune``. Only the test
            part is read: of batches alone make ``([], batches)``.
        loss: see ``Task``; None for that of the data, or ``"auto"``.
        metric: see ``Task``; None for that of the data.
        batch_size: examples at a time, where the source lets us choose.
        device: see ``Settings``.
        autocast: see ``Settings``.

    Returns:
        ``test_loss``, the mean over the examples, and the metric, if there is one, under its name
        (see ``Task``): ``error``, the fraction of wrong answers, where nothing else is asked for
        and the targets are classes.

    Raises:
        DataError: there is no test data, or it does not fit the model.
        UsageError: there is no such device, loss or metric, or one of these gives no number.
    """
    return evaluated(
        model,
        data,
        loss=loss,
        metric=metric,
        batch_size=batch_size,
        device=device,
        autocast=autocast,
    )[0]


def evaluated(
    model: nn.Module,
    data: Any,
    *,
    loss: Loss | str | None = None,
    metric: Metric | str | None = None,
    batch_size: int = 100,
    device: str | torch.device = "auto",
    autocast: str | None = None,
) -> tuple[dict[str, float], int]:
    """Return the result of ``evaluate``, and the number of test examples."""
    check_whole("batch_size", batch_size)
    task = Task.of(data, loss, metric)
    if task.test is None:
        raise DataError(
            "this data has no test part, and what stands alone counts as training data. Give both, "
            "of which the first may be empty here: evaluate(model, ([], test)), or a "
            "Task(…, test=…)"
        )
    place = choose(device, model)
    examples, now = 0, list[Batch]()

    def counted() -> Iterator[Batch]:
        nonlocal examples
        for batch in test_batches(task, batch_size, place, WHOLE):
            examples += batch.examples
            now[:] = [batch]
            yield batch

    with on_device(model, place), task.on_device(place), fitting(now, WHAT):
        found = measure(model, counted(), task, place, autocast)
    return found, examples


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
    found: dict[str, list[Tensor]] = {}
    counts: dict[str, int] = {}
    with evaluating(model), precision(device, autocast):
        for batch in batches:
            judged = task.judged(call(model, batch.inputs), batch.targets)
            for name, value in judged.items():
                found.setdefault(name, []).append(_total(value, batch.examples))
                counts[name] = counts.get(name, 0) + batch.examples
            between()
    names = list(dict.fromkeys(name for of_one in world.gather(list(found)) for name in of_one))
    totals = world.total(
        [each for name in names for each in (_sum(found.get(name, [])), counts.get(name, 0))]
    )
    if not sum(totals[1::2]):
        raise DataError("the test data is empty")
    return {
        name: total / examples
        for name, total, examples in zip(names, totals[::2], totals[1::2], strict=True)
    }


def _total(value: Tensor, examples: int) -> Tensor:
    """The sum over a batch, of one number per example or from their mean."""
    return value.float().sum() * (examples / value.numel())


def _sum(values: list[Tensor]) -> float:
    """Sum in float64 on the CPU, after one transfer."""
    return float(torch.stack(values).cpu().double().sum()) if values else 0.0
