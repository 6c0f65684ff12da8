"""The gate of continuous sparsification: Savarese, Silva & Maire 2020 (arXiv 1912.04427)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.gating.kinds.base import hard_sigmoid, logit, register


@register
@dataclass(frozen=True, slots=True)
class ContinuousSparsification:
    """A deterministic sigmoid σ(β·s) that hardens into the step 1[s > 0] as training goes on.

    β rises geometrically from ``beta`` to ``final_beta`` over the steps in which gates learn.
    The gates' parameter ``log_alpha`` is the paper's s: the log odds of a gate at the start of
    training are β·s. As β rises the slope of the sigmoid goes to 0 for all but the gates close
    to 0, so that gates that are to close must move early.

    Attributes:
        beta: β at the start, above 0.
        final_beta: β at the end, at least ``beta``.
        progress: part of the steps in which gates learn, from 0 to 1; set by ``at``.

    Raises:
        UsageError: a setting is outside its range.
    """

    name: ClassVar[str] = "continuous_sparsification"
    is_flat_at_zero: ClassVar[bool] = True

    beta: float = 1.0
    final_beta: float = 200.0
    progress: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.beta <= self.final_beta < math.inf:
            raise UsageError(
                "a gate of continuous sparsification needs 0 < beta <= final_beta; here "
                f"beta = {self.beta}, final_beta = {self.final_beta}"
            )
        if not 0 <= self.progress <= 1:
            raise UsageError(f"progress of a gate must lie in [0, 1], not {self.progress}")

    def at(self, progress: float) -> ContinuousSparsification:
        """Return the gate with β = beta·(final_beta/beta)^progress."""
        return replace(self, progress=progress)

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """σ(β·s); the noise is not used."""
        return hard_sigmoid(log_alpha, None, self._rate)

    def estimate(self, log_alpha: Tensor) -> Tensor:
        """The step 1[s > 0], which has no gradient."""
        return (log_alpha > 0).to(log_alpha.dtype)

    def open_probability(self, log_alpha: Tensor) -> Tensor:
        """σ(β·s), the soft mask, whose sum the paper penalises, instead of P(z ≠ 0)."""
        return torch.sigmoid(log_alpha * self._rate)

    def initial(self, open_probability: float) -> float:
        """The s at which σ(β·s) is ``open_probability``; above 0.5 the step is open.

        Raises:
            UsageError: the probability is not strictly between 0 and 1.
        """
        return logit(open_probability) / self._rate

    @property
    def _rate(self) -> float:
        """The current β."""
        return float(self.beta * (self.final_beta / self.beta) ** self.progress)
