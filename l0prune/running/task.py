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
from l0prune.errors import DataError, UsageError

Source = Split | Iterable[Any]
Loss = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of class scores, in float32.

    Shape: outputs ``(batch, classes, …)`` or an object with such ``.logits``; targets
    ``(batch, …)`` of class numbers, or probabilities of the outputs' shape.
    """
    return F.cross_entropy(scores_of(outputs).float(), targets)


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
class Task:
    """What a model learns to do.

    Attributes:
        train: training examples: a split of a ``Data``, or any iterable of (inputs, targets)
            batches that can be gone through again and again, such as a DataLoader. Inputs are a
            tensor, a tuple of positional or a dict of keyword arguments of the model.
        test: the same for the test; None to report the training loss only.
        loss: ``loss(outputs, targets)``, the mean over a batch, a scalar tensor.
        metric: ``metric(outputs, targets)``, one number per example or their mean, of which
            less is better. It is reported under ``metric_name``.
        metric_name: key of the metric in the records.
        size: N, the number of training examples; None to ask the data.
        steps: batches in one pass over ``train``; None to ask the data.
        name: of the data, for the checkpoint to tell one run from another.
    """

    train: Source
    test: Source | None = None
    loss: Loss = cross_entropy
    metric: Loss = error_rate
    metric_name: str = "error"
    size: int | None = None
    steps: int | None = None
    name: str = ""

    @staticmethod
    def of(given: Any) -> Task:
        """A task from what the user gives: a Task, a Data, (train, test), or training batches.

        Raises:
            DataError: it is nothing to learn from.
        """
        if isinstance(given, Task):
            return given
        if isinstance(given, Data):
            return Task(given.train, given.test, loss=_Checked(given), name=given.name)
        if isinstance(given, tuple) and len(given) == 2:
            return Task(*given)
        if is_split(given) or isinstance(given, Iterable):
            return Task(given)
        raise DataError(
            f"a {type(given).__name__} is nothing to train on; give a data source "
            "(l0prune.load_data('mnist')), a DataLoader, (training, test) loaders, or a Task"
        )


@dataclass(frozen=True)
class _Checked:
    """Cross-entropy that refuses a model with fewer outputs than there are classes."""

    data: Data

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        scores = scores_of(outputs)
        if scores.shape[1] < self.data.classes:
            self.data.check_fits(scores.shape[1])
        return F.cross_entropy(scores.float(), targets)


def is_split(source: Any) -> TypeIs[Split]:
    """Does the source make batches itself, in an order that we choose?"""
    return hasattr(source, "batches")


def scores_of(outputs: Any) -> Tensor:
    """The class scores in what a model returns."""
    scores = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(scores, Tensor):
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
    for leaf in torch.utils._pytree.tree_leaves((targets, inputs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 1
