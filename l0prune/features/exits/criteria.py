"""Criteria of early exits: the score of an answer, and its margin to the threshold.

A forward stops at the first exit whose score is at least its threshold. Criteria are written in
torch only; the exporter translates them for the ONNX file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from l0prune.doors import Registry


class Criterion(ABC):
    """Score of how sure an exit is; further criteria are subclasses with ``@register``.

    Attributes:
        name: in ``choose_exits(criterion=…)``.
        steepness: the most that the score changes if each number of the answers changes by at
            most 1.
    """

    name: ClassVar[str]
    steepness: ClassVar[float] = 1.0

    @abstractmethod
    def score(self, answers: Sequence[Tensor]) -> Tensor:
        """Return the score of the last of these answers, which are in the order of the exits.

        Shape: each (n, classes, …) to (n,).
        """

    def margin(self, score: Tensor, threshold: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the distance to the opposite decision, in units of the score; (n,)."""
        return (score - threshold).abs()


CRITERIA: Registry[type[Criterion]] = Registry("criterion", "criteria")
register = CRITERIA.register


def criterion_of(name: str) -> Criterion:
    """Return the criterion that is registered under a name.

    Raises:
        UsageError: there is none.
    """
    return CRITERIA.named(name)()


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
    """Number of consecutive exits before this one that choose the same class.

    Zhou et al. 2020 (arXiv 2006.04152). For answers with several places it is the lowest count.
    The margin is the least difference between the two largest numbers of any answer.
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
