"""Criteria: how sure an exit is of its answer, and how near that is to the threshold.

A network is left at the first exit whose score is at least its threshold. Each criterion is said
once, in torch: the ONNX file holds what the exporter makes of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from l0prune.errors import UsageError


class Criterion(ABC):
    """Measure of how sure an exit is; a further one is a subclass under ``@register``.

    Attributes:
        name: in ``choose_exits(criterion=…)``.
        steepness: by how much the score changes at most, where no number of the answers changes by
            more than 1.
    """

    name: ClassVar[str]
    steepness: ClassVar[float] = 1.0

    @abstractmethod
    def score(self, answers: Sequence[Tensor]) -> Tensor:
        """Return how sure the last of these answers is, of exits in their order.

        Shape: each (n, classes, …) to (n,).
        """

    def margin(self, score: Tensor, threshold: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return how far the decision is from another one, in units of the score; (n,)."""
        return (score - threshold).abs()


_KINDS: dict[str, type[Criterion]] = {}


def register(kind: type[Criterion]) -> type[Criterion]:
    """Make a criterion known by its name."""
    _KINDS[kind.name] = kind
    return kind


def criterion_of(name: str) -> Criterion:
    """Return the criterion of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in _KINDS:
        raise UsageError(f"there is no criterion {name!r}; there are {', '.join(_KINDS)}")
    return _KINDS[name]()


def _mean_over_places(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


@register
class Confidence(Criterion):
    """The largest probability: max softmax(x)."""

    name = "confidence"

    def score(self, answers: Sequence[Tensor]) -> Tensor:
        """See ``Criterion``."""
        return _mean_over_places(answers[-1].softmax(1).amax(1))


@register
class Entropy(Criterion):
    """1 − H(softmax(x)) / ln C, so that 1 is certain and 0 undecided between C classes.

    |∂H/∂x|₁ ≤ √Var(ln p) ≤ √(ln²C / 4 + 1), which is at most 1.6 ln C from two classes on.
    """

    name = "entropy"
    steepness = 1.6

    def score(self, answers: Sequence[Tensor]) -> Tensor:
        """See ``Criterion``."""
        logs = answers[-1].log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1)
        return _mean_over_places(1 - entropy / math.log(max(answers[-1].shape[1], 2)))


@register
class Patience(Criterion):
    """Agreement: how many exits before this one, without a break, choose the same class.

    Zhou et al. 2020 (arXiv 2006.04152). Of answers with several places it is the lowest. The
    decision is as far from another one as the two largest scores of any answer are apart.
    """

    name = "patience"
    steepness = 2.0

    def score(self, answers: Sequence[Tensor]) -> Tensor:
        """See ``Criterion``."""
        chosen = [answer.argmax(1) for answer in answers]
        count = torch.zeros_like(answers[-1].amax(1))
        agree = torch.ones_like(count)
        for earlier in reversed(chosen[:-1]):
            agree = agree * (earlier == chosen[-1]).to(agree.dtype)
            count = count + agree
        return count.flatten(1).amin(1) if count.dim() > 1 else count

    def margin(self, score: Tensor, threshold: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """See ``Criterion``."""
        gaps = []
        for answer in answers:
            first, second = answer.topk(2, 1).values.unbind(1)
            gap = first - second
            gaps.append(gap.flatten(1).amin(1) if gap.dim() > 1 else gap)
        return torch.stack(gaps).amin(0)
