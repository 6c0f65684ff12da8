"""The binary concrete gate: Maddison, Mnih & Teh 2017, Jang, Gu & Poole 2017."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.gating.kinds.base import hard_sigmoid, logit, register


@register
@dataclass(frozen=True, slots=True)
class BinaryConcrete:
    """The binary concrete variable, without the stretch of hard concrete: 0 < z < 1.

    It relaxes a Bernoulli variable that is open with probability σ(log α). A sample is above ½
    with just that probability, at every temperature; but it is never 0, so training never sees
    the network without a slot.

    Attributes:
        beta: temperature, above 0; the smaller, the closer samples are to 0 and 1.

    Raises:
        UsageError: a setting is outside its range.
    """

    name: ClassVar[str] = "binary_concrete"
    is_flat_at_zero: ClassVar[bool] = True

    beta: float = 2 / 3

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UsageError(f"beta of a binary concrete gate must be above 0, not {self.beta}")

    def at(self, progress: float) -> BinaryConcrete:
        """Return this gate, which is the same throughout training."""
        return self

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """``σ((log u − log(1−u) + log α)/β)``.

        Args:
            log_alpha: flat, shape ``(gates,)``.
            noise: u of the same shape, strictly between 0 and 1.
        """
        return hard_sigmoid(log_alpha, noise.logit(), 1 / self.beta)

    def estimate(self, log_alpha: Tensor) -> Tensor:
        """The more likely value, 1[log α > 0], which has no gradient."""
        return (log_alpha > 0).to(log_alpha.dtype)

    def open_probability(self, log_alpha: Tensor) -> Tensor:
        """P(z > ½) = ``σ(log α)``, instead of P(z ≠ 0)."""
        return torch.sigmoid(log_alpha)

    def initial(self, open_probability: float) -> float:
        """The log α at which P(z > ½) is ``open_probability``; above 0.5 the gate is open.

        Raises:
            UsageError: the probability is not strictly between 0 and 1.
        """
        return logit(open_probability)
