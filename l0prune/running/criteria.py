"""Losses and metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from l0prune.capture.outputs import chosen_outputs
from l0prune.data.dataset import map_tensors
from l0prune.errors import UsageError
from l0prune.files.consent import is_code
from l0prune.files.user_code import function
from l0prune.plan.names import check_criterion

# Tolerance of the sum of class probabilities, which is 1, also in half precision.
_SUMS_TO_1 = 0.01


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Mean cross-entropy of class scores, in float32.

    Shape: outputs ``(batch, classes, …)`` or an object with such ``.logits``; targets
    ``(batch, …)`` of class numbers (-100 is ignored), or probabilities of the outputs' shape.
    """
    scores = _class_scores(outputs)
    if not _are_classes(scores, targets):
        raise UsageError(_other_losses(scores, targets))
    return F.cross_entropy(
        scores.float(), targets if targets.is_floating_point() else targets.long()
    )


def error_rate(outputs: Any, targets: Any) -> Tensor:
    """Return for each example the fraction of its targets that do not have the highest score.

    Targets that are no class number, such as -100 or 255, are ignored; an example that has only
    such targets counts as 0.

    Shape: as for ``cross_entropy``; result ``(batch,)``.
    """
    scores = _class_scores(outputs)
    if not _are_classes(scores, targets):
        raise UsageError(
            "the metric counts wrong classes, which the outputs and targets are not: they are "
            f"{describe(scores)} and {describe(targets)}"
        )
    assert isinstance(targets, Tensor)
    if targets.is_floating_point():
        targets = targets.argmax(1)
    counts = (targets >= 0) & (targets < scores.shape[1])
    wrong: Tensor = ((scores.argmax(1) != targets) & counts).float()
    if wrong.dim() == 1:
        return wrong
    return wrong.flatten(1).sum(1).div(counts.flatten(1).sum(1).clamp(min=1))


def is_classification(outputs: Any, targets: Any) -> bool:
    """Return whether outputs are class scores, one row per example, and targets choose a class.

    False for ``.logits`` of sequences, whose classes are in the last dim.
    """
    scores = tensor_output(outputs)
    return scores is not None and class_dim(outputs) == 1 and _are_classes(scores, targets)


def class_dim(outputs: Any) -> int | None:
    """Return the dim of a model's output tensor that holds the class scores.

    It is dim 1, as in torch; for ``.logits`` of shape (batch, places, classes) the last. None if
    there is one number per example, or the output is no tensor.
    """
    scores = tensor_output(outputs)
    if scores is None or scores.dim() < 2:
        return None
    dim = 2 if scores.dim() == 3 and not isinstance(outputs, Tensor) else 1
    return dim if scores.shape[dim] > 1 else None


def tensor_output(outputs: Any) -> Tensor | None:
    """Return a model's output if it is a tensor, or its ``.logits`` if they are."""
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None


def measured(outputs: Any, names: Sequence[str] = ()) -> Any:
    """Return the part of a model's outputs that matters: that of these names, else the documented.

    In the outputs of transformers (mappings that are dataclasses) the latter are the logits, or
    without any the last hidden state. All others matter whole.

    Raises:
        UsageError: a name is none of the outputs.
    """
    if names:
        chosen = chosen_outputs(outputs, names)
        if len(chosen) > 1:
            return tuple(chosen)
        return outputs if chosen[0] is tensor_output(outputs) else chosen[0]
    if tensor_output(outputs) is not None or not _is_documented(outputs):
        return outputs
    scores = [key for key in outputs if key.startswith(_SCORES) or key.endswith(_SCORES)]
    found = [outputs[key] for key in scores or (_STATE,) if isinstance(outputs.get(key), Tensor)]
    return (tuple(found) if len(found) > 1 else found[0]) if found else outputs


_SCORES, _STATE = "logits", "last_hidden_state"  # fields of the outputs of transformers


def _is_documented(outputs: Any) -> bool:
    return isinstance(outputs, Mapping) and is_dataclass(outputs)


def joined(outputs: Any) -> Tensor | None:
    """Return a tensor of outputs, or several as one row for each example; None if that fails.

    Of several tensors those that hold whole numbers are left out.

    Shape: of several tensors ``(examples, numbers)``.
    """
    found = tensor_output(outputs)
    if found is not None:
        return found
    tensors = several(outputs)
    if not tensors or len({len(tensor) for tensor in tensors}) > 1:
        return None
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1)


def several(outputs: Any) -> list[Tensor]:
    """Return the tensors among several outputs that hold no whole numbers, nor one for a batch."""
    each = list[Tensor]()
    map_tensors(outputs, each.append)
    return [tensor for tensor in each if tensor.is_floating_point() and tensor.dim()]


def needed_tensor(outputs: Any, otherwise: str) -> Tensor:
    """Return ``tensor_output``; raise a UsageError that ends in ``otherwise`` if there is none."""
    found = tensor_output(outputs)
    if found is None:
        raise UsageError(f"the model returns a {type(outputs).__name__}{otherwise}")
    return found


def _class_scores(outputs: Any) -> Tensor:
    """Return the class scores in a model's outputs."""
    return needed_tensor(
        outputs,
        ", not a tensor of class scores; give a loss (and a metric) that knows what to do with it: "
        "loss=a function of (outputs, targets)",
    )


def _are_classes(scores: Tensor, targets: Any) -> bool:
    """Return whether targets choose a class, by number or by probabilities that sum to 1."""
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or _is_one(scores):
        return False
    if not targets.is_floating_point():
        return targets.shape == _places(scores)
    sums = targets.detach().float().sum(1) if targets.shape == scores.shape else None
    return sums is not None and bool(((sums - 1).abs() < _SUMS_TO_1).all() & (targets >= 0).all())


def _other_losses(scores: Tensor, targets: Any) -> str:
    """Return a message that suggests other losses if cross-entropy does not fit."""
    if not isinstance(targets, Tensor):
        return (
            f"cross-entropy is not for targets that are a {type(targets).__name__}; give a loss "
            "that is: loss=a function of (outputs, targets)"
        )
    text = (
        f"cross-entropy is not for outputs of shape {tuple(scores.shape)} with {describe(targets)}"
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
    """Return whether there is one number per example, so that there are no classes."""
    return scores.dim() < 2 or scores.shape[1] == 1


def _places(scores: Tensor) -> torch.Size:
    """Return the shape of class numbers for these scores: all dims but that of the classes."""
    return scores.shape[:1] + scores.shape[2:]


Loss = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]

AUTO, NEXT_TOKEN, PERPLEXITY = "auto", "next-token", "perplexity"
IGNORED = -100  # the target that torch's cross-entropy leaves out
# Elementwise losses: targets have the shape of the outputs.
_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth-l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


def _elementwise(name: str, outputs: Any, targets: Any) -> Tensor:
    """Return the mean loss of this name, in float32 at least; a dim of 1 may be missing.

    Shape: outputs and targets alike, or ``(batch, 1)`` and ``(batch,)``.
    """
    return _ELEMENTWISE[name](*_alike(name, outputs, targets))


def label_error(outputs: Any, targets: Any) -> Tensor:
    """Return for each example the fraction of labels whose score has the wrong sign.

    Shape: outputs and targets of 0 and 1 ``(batch, …)``; result ``(batch,)``.
    """
    scores, labels = _alike("label-error", outputs, targets)
    wrong = ((scores > 0) != (labels > 0.5)).float()
    return wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong


@dataclass(frozen=True)
class TokenMean:
    """Mean over tokens, given as sum and count, since batches may differ in their counts."""

    total: Tensor
    count: int


def next_token(outputs: Any, targets: Any) -> Tensor:
    """Mean cross-entropy of each token but the first of a text, in float32 at least.

    Shape: outputs ``(texts, tokens, vocabulary)`` or an object with such ``.logits``, of which
    those at one token are for the next one; targets ``(texts, tokens)``, the tokens themselves
    (-100 is ignored).
    """
    total, count = _token_losses(outputs, targets)
    return total / count


def perplexity(outputs: Any, targets: Any) -> TokenMean:
    """Return the cross-entropy whose exp is the perplexity; shapes as for ``next_token``."""
    total, count = _token_losses(outputs, targets)
    return TokenMean(total.detach().double(), count)


def _token_losses(outputs: Any, targets: Any) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropies of the tokens that count, and their number."""
    scores = _class_scores(outputs)
    is_text = isinstance(targets, Tensor) and not targets.is_floating_point()
    if not is_text or scores.dim() != 3 or scores.shape[:2] != targets.shape:
        raise UsageError(
            "next-token and perplexity take scores of shape (texts, tokens, vocabulary) and the "
            f"tokens themselves, (texts, tokens); here are {describe(scores)} and "
            f"{describe(targets)}. A model that is to be tested so has a head for the next token "
            "(of transformers AutoModelForCausalLM)"
        )
    wide = scores if scores.dtype == torch.float64 else scores.float()
    known, tokens = wide[:, :-1].flatten(0, 1), targets[:, 1:].flatten().long()
    total = F.cross_entropy(known, tokens, ignore_index=IGNORED, reduction="sum")
    return total, int((tokens != IGNORED).sum())


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """Return for each example the fraction of its targets that have the highest score."""
    return 1 - error_rate(outputs, targets)


def distance(mine: Tensor, theirs: Tensor, temperature: float, dim: int | None) -> Tensor:
    """Return T²·KL between softened class probabilities, the mean over examples and positions.

    Args:
        mine, theirs: of one shape.
        temperature: T.
        dim: that of the classes; None where there are none: the mean squared difference.
    """
    if dim is None:
        return F.mse_loss(mine.float(), theirs.float())
    soft = [F.log_softmax(s.float() / temperature, dim) for s in (mine, theirs)]
    each = F.kl_div(soft[0], soft[1], reduction="none", log_target=True).sum(dim)
    return temperature**2 * each.mean()


_LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    **{name: partial(_elementwise, name) for name in _ELEMENTWISE},
    NEXT_TOKEN: next_token,
}
_METRICS: dict[str, Metric] = {
    "error": error_rate,
    "accuracy": accuracy,
    "label-error": label_error,
    "mae": _LOSSES["l1"],
    PERPLEXITY: perplexity,
    **_LOSSES,
}
LARGER_IS_BETTER = frozenset({"accuracy"})


def check_name(given: Any, kind: str) -> None:
    """Refuse anything but the name of a loss (or metric, by ``kind``), code, or a function."""
    if not (callable(given) or (isinstance(given, str) and is_code(given))):
        check_criterion(str(given), kind)


def loss_of(given: Loss | str) -> Loss:
    """Return the loss given by name, ``file.py:function`` or function; not ``"auto"``."""
    return _function(given, "loss", _LOSSES)


def metric_of(given: Metric | str) -> Metric:
    """Return the metric given by name, ``file.py:function`` or function."""
    return _function(given, "metric", _METRICS)


def _function(given: Any, kind: str, known: Mapping[str, Loss]) -> Loss:
    check_name(given, kind)
    if not isinstance(given, str):
        return given  # type: ignore[no-any-return]
    return known[given] if given in known else function(given, kind)


def metric_name(given: Any) -> str:
    """Return the name of a loss or metric in records and messages; empty for a lambda."""
    if isinstance(given, str):
        return given.rpartition(":")[2]
    if given is error_rate:
        return "error"
    if isinstance(given, partial):
        return metric_name(given.func)
    name = getattr(given, "__name__", type(given).__name__)
    return "" if name == "<lambda>" else str(name)


def _called(kind: str, given: Any) -> str:
    return f"the {kind} {metric_name(given)}".rstrip()


def scalar_loss(loss: Any, of: Any) -> Tensor:
    """Return the loss of a batch, which must be a scalar."""
    if not isinstance(loss, Tensor) or loss.dim():
        raise UsageError(
            f"{_called('loss', of)} must be one number, a scalar tensor; it is {describe(loss)}. "
            "Take its mean over the batch"
        )
    return loss


def judged(judge: Callable[[Any], float], network: Any) -> float:
    """Return how much worse a judge of the user's finds a network.

    Raises:
        UsageError: the judge gives no number.
    """
    found = judge(network)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{_called('judge', judge)} must return a number, how much worse a network is, such as "
            f"1 - right(network) / right(model); it returned a {type(found).__name__}"
        ) from error


def metric_values(value: Any, of: Any) -> Tensor | TokenMean:
    """Return a metric's values for a batch as a tensor: one number, or one for each example."""
    if isinstance(value, TokenMean):
        return value
    try:
        tensor = torch.as_tensor(value)  # also of a plain number, and of numpy's
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0)
    if tensor.numel() and not tensor.is_complex():
        return tensor.float()
    raise UsageError(
        f"{_called('metric', of)} must give one number, or one for each example; it gives "
        f"{describe(value)}"
    )


def describe(part: Any) -> str:
    """Describe a part of a batch by shapes and types."""
    if isinstance(part, Tensor):
        return f"{tuple(part.shape)} of {str(part.dtype).removeprefix('torch.')}"
    if isinstance(part, tuple | list):
        return f"({', '.join(map(describe, part))})"
    if isinstance(part, Mapping):
        return ", ".join(f"{key}: {describe(value)}" for key, value in part.items())
    return "None" if part is None else f"a {type(part).__name__}"


def _alike(name: str, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and targets in the same shape and dtype."""
    found = joined(outputs)
    if found is None or not isinstance(targets, Tensor):
        raise UsageError(
            f"{name} compares a tensor with a tensor; the model gives {describe(outputs)}, and the "
            f"targets are {describe(targets)}. Give a function of (outputs, targets) instead"
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
