"""Losses and metrics by name: what is learned from, and what is reported."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.files.consent import is_code
from l0prune.files.user_code import named
from l0prune.running.classes import cross_entropy, error_rate, tensor_in

Loss = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]

AUTO = "auto"
# One number against one: what the outputs are compared with has their shape.
_ONE_TO_ONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth-l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


def one_to_one(name: str, outputs: Any, targets: Any) -> Tensor:
    """The mean loss of this name, in float32 at least. A dim of 1 may be missing on one side.

    Shape: outputs and targets alike, or ``(batch, 1)`` and ``(batch,)``.

    Raises:
        UsageError: they have other shapes, so that torch would repeat one of them.
    """
    return _ONE_TO_ONE[name](*_alike(name, outputs, targets))


def label_error(outputs: Any, targets: Any) -> Tensor:
    """For each example, the fraction of its labels that the scores are on the wrong side of 0 for.

    Shape: outputs and targets of 0 and 1 ``(batch, …)``; result ``(batch,)``.
    """
    scores, labels = _alike("label-error", outputs, targets)
    wrong = ((scores > 0) != (labels > 0.5)).float()
    return wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """For each example, the fraction of its targets that have the highest score."""
    return 1 - error_rate(outputs, targets)


_NAMED: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    **{name: partial(one_to_one, name) for name in _ONE_TO_ONE},
}
LOSSES = (AUTO, *_NAMED)
_MEASURED: dict[str, Metric] = {
    "error": error_rate,
    "accuracy": accuracy,
    "label-error": label_error,
    "mae": _NAMED["l1"],
    **_NAMED,
}
METRICS = tuple(_MEASURED)
LARGER_IS_BETTER = frozenset({"accuracy"})


def check_name(given: Any, kind: str) -> None:
    """Refuse what is neither a name of a loss (or a metric, by ``kind``), nor code, nor a function.

    Raises:
        UsageError: with the names that there are.
    """
    known = LOSSES if kind == "loss" else METRICS
    if callable(given) or (isinstance(given, str) and (given in known or is_code(given))):
        return
    near = difflib.get_close_matches(str(given), known, n=1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    raise UsageError(
        f"there is no {kind} {given!r}; {hint} are {', '.join(known)}, a file.py:function, and in "
        "Python a function of (outputs, targets)"
    )


def loss_of(given: Loss | str) -> Loss:
    """The loss that a name, ``file.py:function`` or function stands for; not for ``"auto"``."""
    return _function(given, "loss", _NAMED)


def metric_of(given: Metric | str) -> Metric:
    """The metric that a name, ``file.py:function`` or function stands for."""
    return _function(given, "metric", _MEASURED)


def _function(given: Any, kind: str, known: Mapping[str, Loss]) -> Loss:
    check_name(given, kind)
    if not isinstance(given, str):
        return given  # type: ignore[no-any-return]
    if given in known:
        return known[given]
    found = named(given)
    if not callable(found):
        raise UsageError(f"{given} is a {type(found).__name__}, not a function for a {kind}")
    return found  # type: ignore[no-any-return]


def label(given: Any) -> str:
    """Return the name of a loss or metric in records and messages; empty for a lambda."""
    if isinstance(given, str):
        return given.rpartition(":")[2]
    if given is error_rate:
        return "error"
    if isinstance(given, partial):
        return label(given.func)
    name = getattr(given, "__name__", type(given).__name__)
    return "" if name == "<lambda>" else str(name)


def _called(kind: str, given: Any) -> str:
    return f"the {kind} {label(given)}".rstrip()


def one_number(loss: Any, of: Any) -> Tensor:
    """The loss of a batch, which must be a scalar.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        raise UsageError(
            f"{_called('loss', of)} must be one number, a scalar tensor; it is {shapes(loss)}. "
            "Take its mean over the batch"
        )
    return loss


def numbers(value: Any, of: Any) -> Tensor:
    """Return a metric's values for a batch as a tensor: one number, or one for each example.

    Raises:
        UsageError: it is no number.
    """
    try:
        tensor = torch.as_tensor(value)  # also of a plain number, and of numpy's
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0)
    if tensor.numel() and not tensor.is_complex():
        return tensor.float()
    raise UsageError(
        f"{_called('metric', of)} must give one number, or one for each example; it gives "
        f"{shapes(value)}"
    )


def shapes(part: Any) -> str:
    """A part of a batch for people: shapes and types."""
    if isinstance(part, Tensor):
        return f"{tuple(part.shape)} of {str(part.dtype).removeprefix('torch.')}"
    if isinstance(part, tuple | list):
        return f"({', '.join(map(shapes, part))})"
    if isinstance(part, Mapping):
        return ", ".join(f"{key}: {shapes(value)}" for key, value in part.items())
    return "None" if part is None else f"a {type(part).__name__}"


def _alike(name: str, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Outputs and targets as numbers of one shape and type."""
    found = tensor_in(outputs)
    if found is None or not isinstance(targets, Tensor):
        raise UsageError(
            f"{name} compares a tensor with a tensor; the model gives {shapes(outputs)}, and the "
            f"targets are {shapes(targets)}. Give a function of (outputs, targets) instead"
        )
    if _without_ones(found) != _without_ones(targets) or found.shape[:1] != targets.shape[:1]:
        raise UsageError(
            f"{name} compares numbers one by one, but the outputs have the shape "
            f"{tuple(found.shape)} and the targets {tuple(targets.shape)}. Give targets of the "
            "outputs' shape, or a function of (outputs, targets)"
        )
    scores = found if found.dtype == torch.float64 else found.float()
    return scores.reshape(targets.shape), targets.to(scores.dtype)


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]
