"""Evaluation passes over data: loss and metric, first checks, BatchNorm statistics.

All run in eval mode, with deterministic gates, and restore the model's mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import BatchNormBase, pytree
from l0prune.capture.model_checks import evaluating
from l0prune.capture.undisturbed import trying
from l0prune.data.dataset import WHOLE, without_labels
from l0prune.errors import DataError, L0pruneError, Mismatch, NotGated
from l0prune.gating.attaching import gates_of
from l0prune.plan.numbers import check_whole
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage, steps
from l0prune.running.batches import (
    Batch,
    Feed,
    call,
    count_of_batches,
    test_batches,
    usual_batch_size,
)
from l0prune.running.criteria import Loss, Metric, TokenMean, describe
from l0prune.running.device import choose_device, on_device, precision
from l0prune.running.indices import checked_indices
from l0prune.running.processes import ALONE, World
from l0prune.running.task import Task

_TEST = "model, test data, loss and metric"


def check_first_batch(
    model: nn.Module, feed: Feed, device: torch.device, autocast: str | None
) -> float | None:
    """Check that model and loss run on one training batch.

    Returns the loss, in eval mode; None if the model returns none in that mode.
    """
    batch = next(feed.train(0, device), None)
    if batch is None:
        raise DataError("the training data is empty")
    with (
        explain_mismatch([batch], "model, data and loss", model),
        trying(model),
        precision(device, autocast),
        checked_indices(),
    ):
        loss = feed.task.loss_in(call(model, batch.inputs), batch.targets)
    return None if loss is None else float(loss)


def check_first_test(
    model: nn.Module, feed: Feed, device: torch.device, autocast: str | None
) -> None:
    """Check the first test batch, if there is one, with the metric."""
    for batch in islice(test_batches(feed.task, feed.batch_size, device, feed.part), 1):
        with (
            explain_mismatch([batch], _TEST, model),
            trying(model),
            precision(device, autocast),
            checked_indices(),
        ):
            feed.task.loss_and_metric(call(model, batch.inputs), batch.targets)


@contextmanager
def explain_mismatch(
    batches: Sequence[Batch], what: str, model: nn.Module | None = None
) -> Iterator[None]:
    """Convert errors within the context into a Mismatch that describes the last batch.

    If the inputs differ in shape or dtype from those that the model was gated with, it says so.
    """
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
        differs = "" if model is None else _gated_for(model, batch.inputs)
        targets = "" if batch.targets is None else f", targets {describe(batch.targets)}"
        raise Mismatch(
            f"{what} do not fit together. The inputs are {describe(batch.inputs)}{targets}."
            f"{differs} The call failed with {type(error).__name__}: "
            f"{str(error).removesuffix('.')}.{hint}"
        ) from error


def _gated_for(model: nn.Module, inputs: Any) -> str:
    """Describe the inputs that a model was gated with, if these have other shapes or dtypes."""
    try:
        args, kwargs = gates_of(model).example
    except NotGated:
        return ""
    known = kwargs or (args[0] if len(args) == 1 else args)
    given = without_labels(inputs)
    if _kinds(known) == _kinds(given):
        return ""
    return f" The model was gated with {describe(known)} (the first size is the batch)."


def _kinds(inputs: Any) -> list[tuple[Any, ...]]:
    """Return shape, without the batch, and dtype of each tensor."""
    tensors = [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor)]
    return [(each.shape[1:], each.dtype) for each in tensors]


@displayed
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    loss: Loss | str | None = None,
    metric: Metric | str | None = None,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    autocast: str | None = None,
    progress: bool = True,
) -> dict[str, float]:
    """Return test loss and metric of any model, gated or not.

    Args:
        model: left as it was found, its mode included.
        data: a data source, (training, test) or a ``Task``, as for ``finetune``. Only the test
            part is read; give batches alone as ``([], batches)``.
        loss: see ``Task``; None for that of the data, or ``"auto"``.
        metric: see ``Task``; None for that of the data.
        batch_size: examples at a time, where the source lets us choose; None for 100, or for
            windows of text as many as have 4,096 tokens.
        device: see ``Settings``.
        autocast: see ``Settings``.
        progress: show progress on stderr.

    Returns:
        ``test_loss``, the mean over the examples, and the metric, if there is one, under its name
        (see ``Task``): ``error``, the fraction of wrong answers, where nothing else is asked for
        and the targets are classes.

    Raises:
        DataError: there is no test data, or it does not fit the model.
        UsageError: there is no such device, loss or metric, or one of these gives no number.
    """
    with stage("testing the model"):
        return evaluate_task(model, Task.of(data, loss, metric), batch_size, device, autocast)[0]


def evaluate_task(
    model: nn.Module,
    task: Task,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    autocast: str | None = None,
) -> tuple[dict[str, float], int]:
    """Return the result of ``evaluate``, and the number of test examples."""
    if batch_size is None:
        batch_size = usual_batch_size(task.test)
    check_whole("batch_size", batch_size)
    if task.test is None:
        raise DataError(
            "this data has no test part, and what stands alone counts as training data. Give both, "
            "of which the first may be empty here: evaluate(model, ([], test)), or a "
            "Task(…, test=…)"
        )
    place = choose_device(device, model)
    examples, now = 0, list[Batch]()

    def counted() -> Iterator[Batch]:
        nonlocal examples
        of = count_of_batches(task.test, batch_size)
        for batch in steps(test_batches(task, batch_size, place, WHOLE), of):
            examples += batch.examples
            now[:] = [batch]
            yield batch

    with on_device(model, place), task.on_device(place), explain_mismatch(now, _TEST, model):
        found = evaluate_batches(model, counted(), task, place, autocast)
    return found, examples


def evaluate_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    device: torch.device,
    autocast: str | None = None,
    between: Callable[[], None] = lambda: None,
    world: World = ALONE,
) -> dict[str, float]:
    """Return loss and metric over the ``batches`` of all processes, equal in each process.

    ``between`` is called after each batch and may raise.
    """
    found: dict[str, list[Tensor]] = {}
    counts: dict[str, int] = {}
    with evaluating(model), precision(device, autocast):
        for batch in batches:
            judged = task.loss_and_metric(call(model, batch.inputs), batch.targets)
            for name, value in judged.items():
                total, count = _total(value, batch.examples)
                found.setdefault(name, []).append(total)
                counts[name] = counts.get(name, 0) + count
            between()
    names = list(dict.fromkeys(name for of_one in world.gather(list(found)) for name in of_one))
    totals = world.total(
        [each for name in names for each in (_sum(found.get(name, [])), counts.get(name, 0))]
    )
    if not sum(totals[1::2]):
        raise DataError("the test data is empty")
    return {
        name: task.of_mean(name, total / count if count else math.nan)
        for name, total, count in zip(names, totals[::2], totals[1::2], strict=True)
    }


def _total(value: Tensor | TokenMean, examples: int) -> tuple[Tensor, int]:
    """Return the sum of a loss or metric over a batch, and the number of summands."""
    if isinstance(value, TokenMean):
        return (value.total, value.count) if examples else (value.total * 0, 0)
    return value.float().sum() * (examples / value.numel()), examples


def _sum(values: list[Tensor]) -> float:
    """Sum in float64 on the CPU, after one transfer."""
    return float(torch.stack(values).cpu().double().sum()) if values else 0.0


def _with_statistics(model: nn.Module) -> Iterator[BatchNormBase]:
    for module in model.modules():
        if isinstance(module, BatchNormBase) and module.track_running_stats:
            yield module


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorms use batch statistics within the context, without updating running ones.

    SyncBatchNorm, whose statistics are those of several processes, is left alone.
    """
    norms = [n for n in _with_statistics(model) if not isinstance(n, nn.SyncBatchNorm)]
    modes = [norm.training for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.track_running_stats = True, False
        yield
    finally:
        for norm, mode in zip(norms, modes, strict=True):
            norm.training, norm.track_running_stats = mode, True


def recalibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: str | None = None,
) -> list[Tensor]:
    """Set running statistics to the plain average over ``batches``, and return these buffers.

    Everything else is in eval mode: so the statistics are those of the deterministic gates and the
    averaged weights, not of gate samples and weights during training. A model without a BatchNorm
    in train mode is left alone.
    """
    norms = [norm for norm in _with_statistics(model) if norm.training]
    if not norms:
        return []
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        with evaluating(model), precision(device, autocast):
            for norm in norms:
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=device)
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative average
                norm.training = True
            for batch in batches:
                call(model, batch.inputs)
    finally:
        for norm, (momentum, tracked) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
    return [b for n in norms for b in (n.running_mean, n.running_var) if b is not None]
