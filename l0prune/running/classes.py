"""Answers that choose between classes: the loss and the metric where none is given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from l0prune.errors import UsageError

# Probabilities of classes sum to 1 up to this, also in half precision.
_SUMS_TO_1 = 0.01


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Mean cross-entropy of class scores, in float32.

    Shape: outputs ``(batch, classes, …)`` or an object with such ``.logits``; targets
    ``(batch, …)`` of class numbers (-100 counts for nothing), or probabilities of the outputs'
    shape.

    Raises:
        UsageError: the targets are neither, so that another loss is needed.
    """
    scores = scores_of(outputs)
    if not _are_classes(scores, targets):
        raise UsageError(_other_losses(scores, targets))
    return F.cross_entropy(
        scores.float(), targets if targets.is_floating_point() else targets.long()
    )


def error_rate(outputs: Any, targets: Any) -> Tensor:
    """For each example, the fraction of its targets that do not have the highest score.

    Targets that are no number of a class, such as -100 or 255, do not count; an example that
    has only those counts as 0.

    Shape: as for ``cross_entropy``; result ``(batch,)``.

    Raises:
        UsageError: the targets choose between no classes.
    """
    scores = scores_of(outputs)
    if not _are_classes(scores, targets):
        raise UsageError(
            "the metric counts wrong classes, which the outputs and targets are not: they are "
            f"{_described(scores)} and {_described(targets)}"
        )
    assert isinstance(targets, Tensor)
    if targets.is_floating_point():
        targets = targets.argmax(1)
    counts = (targets >= 0) & (targets < scores.shape[1])
    wrong: Tensor = ((scores.argmax(1) != targets) & counts).float()
    if wrong.dim() == 1:
        return wrong
    return wrong.flatten(1).sum(1).div(counts.flatten(1).sum(1).clamp(min=1))


def choose_classes(outputs: Any, targets: Any) -> bool:
    """Return whether outputs are class scores, one row an example, and targets choose a class."""
    scores = tensor_in(outputs)
    if scores is None or scores.dim() < 2:
        return False
    # What is called logits may be a sequence, whose classes come last: there it is not told.
    is_sequence = not isinstance(outputs, Tensor) and scores.dim() > 2
    return not is_sequence and _are_classes(scores, targets)


def tensor_in(outputs: Any) -> Tensor | None:
    """Return a model's output if it is a tensor, or its ``.logits`` if they are."""
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None


def scores_of(outputs: Any) -> Tensor:
    """The class scores in what a model returns."""
    scores = tensor_in(outputs)
    if scores is None:
        raise UsageError(
            f"the model returns a {type(outputs).__name__}, not a tensor of class scores; give a "
            "loss (and a metric) that knows what to do with it: loss=a function of (outputs, "
            "targets)"
        )
    return scores


def _are_classes(scores: Tensor, targets: Any) -> bool:
    """Return whether targets choose a class, by number or by probabilities that sum to 1."""
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or _is_one(scores):
        return False
    if not targets.is_floating_point():
        return targets.shape == _places(scores)
    sums = targets.detach().float().sum(1) if targets.shape == scores.shape else None
    return sums is not None and bool(((sums - 1).abs() < _SUMS_TO_1).all() & (targets >= 0).all())


def _other_losses(scores: Tensor, targets: Any) -> str:
    """Suggest losses where cross-entropy does not fit."""
    if not isinstance(targets, Tensor):
        return (
            f"cross-entropy is not for targets that are a {type(targets).__name__}; give a loss "
            "that is: loss=a function of (outputs, targets)"
        )
    text = (
        f"cross-entropy is not for outputs of shape {tuple(scores.shape)} with "
        f"{_described(targets)}"
    )
    if _is_one(scores):
        text += ": one number for an example is no choice between classes"
    if targets.numel() == scores.numel():
        return (
            f"{text}. For numbers give loss='mse', 'l1' or 'smooth-l1', for labels that are 0 or 1 "
            "loss='bce'"
        )
    if _is_one(scores):
        return f"{text}. Give a loss of your own: loss=a function of (outputs, targets)"
    places = tuple(_places(scores))
    if targets.is_floating_point() and targets.shape == places:
        return f"{text}. Class numbers are whole: give targets.long()"
    return (
        f"{text}. Class numbers would have the shape {places}; for anything else give loss=a "
        "function of (outputs, targets)"
    )


def _is_one(scores: Tensor) -> bool:
    """Return whether there is one number for each example, so that there are no classes."""
    return scores.dim() < 2 or scores.shape[1] == 1


def _described(part: Any) -> str:
    if not isinstance(part, Tensor):
        return f"a {type(part).__name__}"
    return f"{str(part.dtype).removeprefix('torch.')} of shape {tuple(part.shape)}"


def _places(scores: Tensor) -> torch.Size:
    """The shape of class numbers for these scores: all dims but that of the classes."""
    return scores.shape[:1] + scores.shape[2:]
