"""A task: the data, the loss that is learned from and the metric that is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeIs

from l0prune.data import Data
from l0prune.data.dataset import Split
from l0prune.data.inputs import plain
from l0prune.errors import DataError, UsageError

Source = Split | Iterable[Any]
Loss = Callable[[Any, Any], Tensor]

# Probabilities of classes sum to 1 up to this, also in half precision.
_SUMS_TO_1 = 0.01


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of class scores, in float32: the loss where none is given.

    Shape: outputs ``(batch, classes, …)`` or an object with such ``.logits``; targets
    ``(batch, …)`` of class numbers, or probabilities of the outputs' shape.

    Raises:
        UsageError: the targets are neither, so that a loss has to be named.
    """
    scores = scores_of(outputs)
    if not _are_classes(scores, targets):
        raise UsageError(_way_on(outputs, scores, targets))
    return F.cross_entropy(scores.float(), targets if _is_float(targets) else targets.long())


def _are_classes(scores: Tensor, targets: Any) -> bool:
    """Do the targets choose between classes: by number, or by probabilities that sum to 1?"""
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or scores.shape[1] == 1:
        return False
    if not _is_float(targets):
        return targets.shape == _places(scores)
    sums = targets.detach().float().sum(1) if targets.shape == scores.shape else None
    return sums is not None and bool(((sums - 1).abs() < _SUMS_TO_1).all() & (targets >= 0).all())


def _way_on(outputs: Any, scores: Tensor, targets: Any) -> str:
    """What to write where cross-entropy is not the loss."""
    if not isinstance(targets, Tensor):
        return (
            f"no loss is given, and cross-entropy is not for targets that are a "
            f"{type(targets).__name__}; give l0prune.Task(train, test, loss=…)"
        )
    dtype = str(targets.dtype).removeprefix("torch.")
    text = (
        f"no loss is given, and cross-entropy is not for outputs of shape {tuple(scores.shape)} "
        f"with {dtype} targets of shape {tuple(targets.shape)}"
    )
    if scores.shape[1] == 1:
        text += ": one output column is no choice between classes"
    if targets.numel() == scores.numel():
        of_numbers, of_labels = (
            f"l0prune.Task(train, test, loss={_line(name, outputs, scores, targets)})"
            for name in ("mse_loss", "binary_cross_entropy_with_logits")
        )
        return f"{text}. For numbers give {of_numbers}, for labels that are 0 or 1 {of_labels}"
    if _is_float(targets) and targets.shape == _places(scores):
        return f"{text}. Class numbers are whole: give targets.long()"
    return (
        f"{text}. Class numbers would have the shape {tuple(_places(scores))}; for anything else "
        "give l0prune.Task(train, test, loss=…)"
    )


def _line(name: str, outputs: Any, scores: Tensor, targets: Tensor) -> str:
    """One of torch's losses as an argument that fits these outputs y and targets t."""
    y = "y" if isinstance(outputs, Tensor) else "y.logits"
    y += "" if targets.shape == scores.shape else "[:, 0]"
    t = "t" if _is_float(targets) else "t.float()"
    function = f"torch.nn.functional.{name}"
    return function if (y, t) == ("y", "t") else f"lambda y, t: {function}({y}, {t})"


def _is_float(targets: Tensor) -> bool:
    return targets.is_floating_point()


def _places(scores: Tensor) -> torch.Size:
    """The shape of class numbers for these scores: all dims but that of the classes."""
    return scores.shape[:1] + scores.shape[2:]


def error_rate(outputs: Any, targets: Tensor) -> Tensor:
    """For each example, the fraction of its targets that do not have the highest score.

    Shape: as for ``cross_entropy``; result ``(batch,)``.
    """
    scores = scores_of(outputs)
    if targets.is_floating_point() and targets.shape == scores.shape:
        targets = targets.argmax(1)
    wrong = (scores.argmax(1) != targets).float()
    return wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong


@dataclass(frozen=True)
class _OfData:
    """Cross-entropy that refuses a model with fewer outputs than the data has classes."""

    data: Data

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        scores = scores_of(outputs)
        if scores.shape[1] < self.data.classes:
            self.data.check_fits(scores.shape[1])
        return cross_entropy(outputs, targets)


@dataclass(frozen=True)
class Task:
    """What a model learns to do.

    Attributes:
        train: training examples: a split of a ``Data``, or any iterable of (inputs, targets)
            batches that can be gone through again and again, such as a DataLoader. Inputs are a
            tensor, a tuple of positional or a dict of keyword arguments of the model.
        test: the same for the test; None to report the training loss only.
        loss: ``loss(outputs, targets)``, the mean over a batch, a scalar tensor; by default
            cross-entropy, which is for class numbers and probabilities of classes only.
        metric: ``metric(outputs, targets)``, one number per example or their mean, of which
            less is better. It is reported under ``metric_name``. None for the rate of wrong
            answers with the default loss, and for the loss itself with another.
        metric_name: key of the metric in the records; where it is left out, ``error`` for the
            rate of wrong answers, ``loss`` for the loss, ``metric`` for a metric of your own.
        size: N, the number of training examples; None to ask the data.
        steps: batches in one pass over ``train``; None to ask the data.
        name: of the data, for the checkpoint to tell one run from another.
    """

    train: Source
    test: Source | None = None
    loss: Loss = cross_entropy
    metric: Loss | None = None
    metric_name: str = ""
    size: int | None = None
    steps: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.metric is None and (self.loss is cross_entropy or isinstance(self.loss, _OfData)):
            object.__setattr__(self, "metric", error_rate)
        if not self.metric_name:
            own = "loss" if self.metric is None else "metric"
            name = "error" if self.metric is error_rate else own
            object.__setattr__(self, "metric_name", name)

    def judged(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Loss and metric of a batch: one number each, or one per example for the metric."""
        loss = self.loss(outputs, targets)
        return loss, loss if self.metric is None else self.metric(outputs, targets)

    @staticmethod
    def of(given: Any) -> Task:
        """A task from what the user gives: a Task, a Data, (train, test), or training batches.

        Raises:
            DataError: it is nothing to learn from.
        """
        if isinstance(given, Task):
            return given
        if isinstance(given, Data):
            return Task(given.train, given.test, loss=_OfData(given), name=given.name)
        if isinstance(given, tuple) and len(given) == 2:
            return Task(*given)
        if is_split(given) or isinstance(given, Iterable):
            return Task(given)
        raise DataError(
            f"a {type(given).__name__} is nothing to train on; give a data source "
            "(l0prune.load_data('mnist')), a DataLoader, (training, test) loaders, or a Task"
        )


def is_split(source: Any) -> TypeIs[Split]:
    """Does the source make batches itself, in an order that we choose?"""
    return hasattr(source, "batches")


def tensor_in(outputs: Any) -> Tensor | None:
    """What a model returns if that is a tensor, or its ``.logits`` if those are one."""
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None


def scores_of(outputs: Any) -> Tensor:
    """The class scores in what a model returns."""
    scores = tensor_in(outputs)
    if scores is None:
        raise UsageError(
            f"the model returns a {type(outputs).__name__}, not a tensor of class scores; give a "
            "Task with a loss (and a metric) that knows what to do with it"
        )
    if scores.dim() < 2:
        raise DataError(
            f"the model's output has the shape {tuple(scores.shape)}; class scores would be "
            "(batch, classes). Give a Task with a loss of your own"
        )
    return scores


def batch_length(inputs: Any, targets: Any) -> int:
    """Number of examples in a batch."""
    for leaf in torch.utils._pytree.tree_leaves(plain((targets, inputs))):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 1
