"""Nearness of a network's outputs to those of the network that it was cut from.

It is measured as a part of the outputs' variance, and where outputs are classes as agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.features.unlabelled.lockstep import real_places
from l0prune.progress.stages import steps
from l0prune.running.batches import call
from l0prune.running.criteria import (
    class_dim,
    describe,
    is_classification,
    measured,
    tensor_output,
)
from l0prune.running.output_parts import STILL, Parts, apart
from l0prune.selection.score_input import output_tensor

_NOTHING = 1e-30  # instead of a variance of zero
_PART = 1 << 22  # elements of outputs that are compared at a time
_PROBABLE = 0.01  # how far sums of probabilities may be from 1


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Nearness of a network's outputs to those of the network that it was cut from.

    Attributes:
        error: the mean square of the difference over the variance of the original's outputs; of
            several outputs, or parts that one is joined of, the mean of each one's.
        agreement: the part of the inputs (of their places, in a dense task) whose largest output is
            the same; None where outputs are single numbers.
    """

    error: float
    agreement: float | None

    @property
    def is_useless(self) -> bool:
        """Return whether the mean of the original's outputs would be as near to them."""
        return not self.error < 1

    @property
    def uselessness(self) -> str:
        """Sentence about outputs that are no nearer than their mean."""
        return (
            f"the smaller network's outputs say less than a constant: {self}, where the mean of "
            "the original's outputs would have an error of 100%"
        )

    def __str__(self) -> str:
        """Return both as text."""
        error = f"error of {self.error:.2%} of the outputs' variance"
        if self.agreement is None:
            return error
        return f"the largest output is the same for {self.agreement:.1%}, {error}"


DimOf = Callable[[Any], int | None]  # from outputs to the dim of their classes


def fidelity(
    dense: nn.Module,
    other: nn.Module,
    batches: Iterable[Any],
    classes: DimOf = class_dim,
    names: Sequence[str] = (),
    parts: Parts = (),
) -> Fidelity:
    """Return how close a network's outputs are to another's; both in eval mode.

    ``names`` are those of the outputs that matter (see ``measured``), ``parts`` what is joined in
    them; see ``in_parts``.
    """
    return fidelities(dense, [partial(call, other)], batches, classes, names, parts)[0]


def fidelities(
    dense: nn.Module,
    others: Sequence[Callable[[Any], Any]],
    batches: Iterable[Any],
    classes: DimOf = class_dim,
    names: Sequence[str] = (),
    parts: Parts = (),
) -> list[Fidelity]:
    """Return how close outputs of functions of a batch are to a network's; see ``fidelity``."""
    errors, alike, count = [_Apart() for _ in others], [0.0 for _ in others], 0
    with torch.no_grad():
        for batch in steps(batches):
            wanted = answers_of(call(dense, batch), batch, classes, names, parts)
            for number, other in enumerate(others):
                found = answers_of(other(batch), batch, classes, names, parts)
                errors[number].add(found, wanted)
                if wanted.dim is not None:
                    alike[number] += _alike(found.tensor, wanted.tensor, wanted.dim)
            count += 0 if wanted.dim is None else wanted.places
    pairs = zip(errors, alike, strict=True)
    return [Fidelity(each.share(), same / count if count else None) for each, same in pairs]


@dataclass(frozen=True, slots=True)
class Classes:
    """Dim of a network's outputs in which each place has a number for each class.

    Attributes:
        dim: among those of the output; None if there is none, or it is not known.
        are_known: the outputs are those of classes for sure: by the targets, by their sums, or
            since it was said.
        are_scores: they are scores before a softmax.
    """

    dim: int | None
    are_known: bool
    are_scores: bool

    def dim_of(self, outputs: Any) -> int | None:
        """Return the dim."""
        return self.dim


def classes_of(outputs: Any, targets: Any, asked: int | None = None) -> Classes:
    """Return which dim of outputs holds classes.

    It is the one that was asked for; without which targets have the outputs' shape; over which
    outputs sum to 1; or that of an output called logits. Else it is dim 1, as in torch, but of
    three dims, which may be (examples, places, classes), too: there it is unknown.

    Raises:
        UsageError: there is no such dim.
    """
    scores = tensor_output(outputs)
    if scores is None or scores.dim() < 2:
        if asked is not None:
            raise UsageError(
                f"class_dim={asked} is for outputs of one tensor with two dims or more"
            )
        return Classes(None, are_known=False, are_scores=False)
    rank, usual = scores.dim(), class_dim(outputs)
    if asked is not None:
        if not -rank <= asked < rank or asked % rank == 0:
            raise UsageError(
                f"class_dim={asked} is none of the outputs' dims but the first: their shape is "
                f"{tuple(scores.shape)}"
            )
        return Classes(asked % rank, are_known=True, are_scores=not _sums_to_1(scores, asked))
    dims = [dim for dim in (1, rank - 1) if scores.shape[dim] > 1]
    if isinstance(targets, Tensor) and not targets.dtype.is_floating_point:
        for dim in dims:
            if targets.shape == scores.shape[:dim] + scores.shape[dim + 1 :]:
                return Classes(dim, are_known=True, are_scores=not _sums_to_1(scores, dim))
    for dim in dims:
        if _sums_to_1(scores, dim):
            return Classes(dim, are_known=True, are_scores=False)
    is_known = usual is not None and (
        is_classification(outputs, targets) or not isinstance(outputs, Tensor)
    )
    is_unclear = rank == 3 and not is_known
    return Classes(None if is_unclear else usual, are_known=is_known, are_scores=is_known)


def _sums_to_1(scores: Tensor, dim: int) -> bool:
    """Return whether numbers are probabilities, as after a softmax over a dim."""
    sums = scores.float().sum(dim)
    return bool((scores >= 0).all() and ((sums - 1).abs() < _PROBABLE).all())


def divergence(
    wanted: Any, batch: Any, classes: DimOf = class_dim, names: Sequence[str] = ()
) -> Callable[[Any], float]:
    """Return a function from outputs to the mean KL(wanted‖found) of class scores, in nats.

    It is Σ p log p − Σ p·found + log Σ exp found, with p the softmax of the wanted scores.
    """
    scores = answers_of(wanted, batch, classes, names)
    dim = scores.dim or 1
    p = scores.tensor.float().softmax(dim)
    own = sum(_total(torch.special.xlogy(part, part)) for (part,) in _parts((dim,), p))
    count = p.numel() / p.shape[dim]

    def judge(outputs: Any) -> float:
        error = own
        for found, part in _parts((dim,), answers_of(outputs, batch, classes, names).tensor, p):
            found = found.float()
            error += _total(found.logsumexp(dim)) - _total(part * found)
        return max(0.0, error / count)

    return judge


def _alike(found: Tensor, wanted: Tensor, dim: int) -> float:
    """Return the number of places with the same largest number along a dim."""
    pairs = _parts((dim,), found, wanted)
    return float(sum(int((a.argmax(dim) == b.argmax(dim)).sum()) for a, b in pairs))


def _parts(dims: Collection[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield small parts of tensors of one shape, whole along ``dims`` where there are others."""
    others = [each for each in range(tensors[0].dim()) if each not in dims] or [0]
    size, at = max((tensors[0].shape[at], at) for at in others)
    step = max(1, _PART * size // max(1, tensors[0].numel()))
    return zip(*(tensor.split(step, at) for tensor in tensors), strict=True)


def _total(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def relative_error(
    wanted: Any,
    batch: Any,
    classes: DimOf = class_dim,
    names: Sequence[str] = (),
    parts: Parts = (),
) -> Callable[[Any], float]:
    """Return a function from outputs to their squared error over the wanted ones' variance."""
    theirs = answers_of(wanted, batch, classes, names, parts)

    def judge(outputs: Any) -> float:
        found = _Apart()
        found.add(answers_of(outputs, batch, classes, names, parts), theirs)
        return found.share()

    return judge


class _Apart:
    """Squared error of outputs over the variance of the wanted outputs, streamed.

    Parts of them count alike, whatever their sizes and units: the error is the mean of theirs.
    """

    def __init__(self) -> None:
        self._each = list[_OfOne]()

    def add(self, found: Answers, wanted: Answers) -> None:
        """Count a batch."""
        self._each = self._each or [_OfOne() for _ in wanted.each]
        for one, mine, theirs in zip(self._each, found.each, wanted.each, strict=True):
            one.add(mine, theirs)

    def share(self) -> float:
        """Return the mean square of the error over the variance; of one example over its square.

        Of several parts those that are always zero say nothing, and do not count.
        """
        each = [one for one in self._each if one.squares] or self._each
        return sum(one.share() for one in each) / max(1, len(each))


class _OfOne:
    """``_Apart`` of one output.

    The variance is the least about one of several means: that of each number of an example; and
    since examples may be large or of unlike sizes, of each place along one dim, or of all numbers.
    """

    def __init__(self) -> None:
        self.error, self.squares = 0.0, 0.0
        self._totals: dict[tuple[int, ...], Tensor] = {}  # by the dims that stay apart
        self._counts: dict[tuple[int, ...], int] = {}  # numbers of each mean

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Count a batch."""
        if not self._totals:
            dims = tuple(range(1, wanted.dim()))
            each = [dims] if len(dims) > 1 and wanted[:1].numel() <= _PART else []
            kept = [*each, *((dim,) for dim in dims), ()]
            self._totals = dict.fromkeys(kept, torch.zeros(()))
            self._counts = dict.fromkeys(kept, 0)
        for dims, total in list(self._totals.items()):
            sizes = tuple(wanted.shape[each] for each in dims)
            if total.shape not in ((), sizes):
                del self._totals[dims]
                continue
            others = [other for other in range(wanted.dim()) if other not in dims]
            self._counts[dims] += math.prod(wanted.shape[other] for other in others)
            for (part,) in _parts(dims, wanted):
                self._totals[dims] = self._totals[dims] + part.sum(others, dtype=torch.float64)
        for mine, theirs in _parts((), found, wanted):
            self.error += _square(mine - theirs)
            self.squares += _square(theirs)

    def share(self) -> float:
        """Return the error over the variance, or over the square where that does not vary."""
        variances = [
            self.squares - float(total.square().sum()) / count
            for dims, total in self._totals.items()
            if (count := self._counts[dims]) > 1
        ]
        variance = min(variances, default=0.0)
        varies = variance > STILL * self.squares
        return self.error / max(variance if varies else self.squares, _NOTHING)


def _square(values: Tensor) -> float:
    """Return the sum of squares."""
    return float(torch.linalg.vector_norm(values.flatten(), dtype=torch.float64)) ** 2


@dataclass(frozen=True, slots=True)
class Answers:
    """Outputs that matter, for one batch.

    Attributes:
        tensor: all of them; of several a row for each example, as ``joined``.
        dim: that of the classes, or None.
        each: their parts, one by one; see ``apart``.
    """

    tensor: Tensor
    dim: int | None
    each: Sequence[Tensor]

    @property
    def places(self) -> int:
        """The number of choices between classes, or of all numbers where there are none."""
        return self.tensor.numel() // (1 if self.dim is None else self.tensor.shape[self.dim])


def answers_of(
    outputs: Any, batch: Any, classes: DimOf, names: Sequence[str] = (), parts: Parts = ()
) -> Answers:
    """Return the outputs that matter for a batch.

    Of sequences with padding: the other places alone, all in one dim.

    Raises:
        UsageError: the outputs are whole numbers alone.
    """
    outputs = measured(outputs, names)
    found, real = torch.atleast_1d(output_tensor(outputs)), real_places(batch)
    if not found.is_floating_point():
        raise UsageError(
            f"the model returns {describe(found)} alone, by which no nearness can be measured: "
            "give it without its last step (an argmax, a threshold), which can be put back around "
            "the smaller network"
        )
    if real is None or found.shape[:2] != real.shape:
        return Answers(found, classes(outputs), apart(outputs, parts))
    found = found[real]
    return Answers(found, None if classes(outputs) is None else 1, [found])
