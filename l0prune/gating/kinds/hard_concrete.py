"""The hard concrete gate of Louizos, Welling & Kingma 2018 (arXiv 1712.01312), eq. 10-13."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from l0prune.errors import UsageError
from l0prune.gating.kinds.base import hard_sigmoid, logit, register

Number = float | Tensor


def reaches(x: Number, beta: Number, gamma: Number, zeta: Number) -> Any:
    """``β·log((x−γ)/(ζ−x))``: the log α plus logistic noise at which s̄ of eq. 11 is x.

    A number where all of them are, else a tensor.
    """
    odds = (x - gamma) / (zeta - x)
    return beta * (odds.log() if isinstance(odds, Tensor) else math.log(odds))


def divergence(log_alpha: Tensor, prior: Tensor, closed: Number, full: Number) -> Tensor:
    """KL(q(z)‖p(z)) in nats of hard concrete variables that have β, γ and ζ in common.

    By the chain rule of relative entropy over the parts of eq. 26 and 27: the atoms at 0 and 1,
    and what lies between (eq. 28, 29). For equal β, γ and ζ all of it has a closed form. With Q and
    P the distributions of s̄, c = α_p/α_q and v(u) = c + (1−c)·u, the densities at the point where
    Q = u have the ratio q/p = v(u)²/c, and Q/P = v. So with the numbers ℓ = log v at s̄ = 0 and 1,
    and h their difference,

        KL = Q(0)·ℓ₀ + (1−Q(1))·(ℓ₁ − log c)
             + (Q(1)−Q(0))·(ℓ₀ + ℓ₁ − log c + h·coth(h/2) − 2),

    since log v has, over a range of v, the mean (ℓ₀+ℓ₁)/2 + (h/2)·coth(h/2) − 1.

    Args:
        log_alpha: of q; float64 where small values are to be exact.
        prior: log α of p, of the same dtype.
        closed: where s̄ reaches 0, as ``reaches`` gives it.
        full: where it reaches 1.
    """
    zero, one = closed - log_alpha, full - log_alpha
    low = logsigmoid(zero) - logsigmoid(closed - prior)
    high = logsigmoid(one) - logsigmoid(full - prior)
    log_c = prior - log_alpha
    at_zero, at_one = torch.sigmoid(zero), torch.sigmoid(-one)
    between = low + high - log_c + 2 * _coth_excess((high - low) / 2)
    return at_zero * low + at_one * (high - log_c) + (1 - at_zero - at_one) * between


@register
@dataclass(frozen=True, slots=True)
class HardConcrete:
    """A binary concrete variable, stretched to (γ, ζ) and clamped to [0, 1].

    Attributes:
        beta: temperature of the concrete distribution, above 0.
        gamma: lower end of the stretch, below 0, so that z is exactly 0 with some probability.
        zeta: upper end of the stretch, above 1, so that z is exactly 1 with some probability.
        estimator: z in eval mode. ``"paper"`` is eq. 13 and closes a gate whose P(z ≠ 0) is
            below 0.31 (at the default settings); ``"median"`` is the median of z and closes it
            below 0.5.

    Raises:
        UsageError: a setting is outside its range.
    """

    name: ClassVar[str] = "hard_concrete"
    is_flat_at_zero: ClassVar[bool] = True

    beta: float = 2 / 3
    gamma: float = -0.1
    zeta: float = 1.1
    estimator: Literal["paper", "median"] = "paper"

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UsageError(f"beta of a hard concrete gate must be above 0, not {self.beta}")
        if not (-math.inf < self.gamma < 0 and 1 < self.zeta < math.inf):
            raise UsageError(
                "a hard concrete gate needs gamma < 0 and zeta > 1, or it is never exactly 0 or 1; "
                f"here gamma = {self.gamma}, zeta = {self.zeta}"
            )
        if self.estimator not in ("paper", "median"):
            raise UsageError(
                f"estimator must be 'paper' (eq. 13) or 'median', not {self.estimator!r}"
            )

    def at(self, progress: float) -> HardConcrete:
        """This gate: it is the same all through training."""
        return self

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """z of eq. 10-12: ``clamp(σ((log u − log(1−u) + log α)/β)·(ζ−γ) + γ, 0, 1)``.

        Args:
            log_alpha: flat, shape ``(gates,)``.
            noise: u of the same shape, strictly between 0 and 1.
        """
        return hard_sigmoid(log_alpha, noise.logit(), 1 / self.beta, self.gamma, self.zeta)

    def estimate(self, log_alpha: Tensor) -> Tensor:
        """ẑ of eq. 13, ``clamp(σ(log α)·(ζ−γ) + γ, 0, 1)``, or the median, with log α/β."""
        rate = 1.0 if self.estimator == "paper" else 1 / self.beta
        return hard_sigmoid(log_alpha, None, rate, self.gamma, self.zeta)

    def open_probability(self, log_alpha: Tensor) -> Tensor:
        """P(z ≠ 0) of eq. 12, ``σ(log α − β·log(−γ/ζ))``."""
        return torch.sigmoid(log_alpha - self._shift)

    def divergence(self, log_alpha: Tensor, prior: Tensor) -> Tensor:
        """KL(q(z)‖p(z)) in nats of each gate q from the same kind of gate p at log α ``prior``.

        Args:
            log_alpha: flat, shape ``(gates,)``; float64 where small values are to be exact.
            prior: log α of p, of the same shape and dtype.
        """
        full = reaches(1, self.beta, self.gamma, self.zeta)
        return divergence(log_alpha, prior, self._shift, full)

    def initial(self, open_probability: float) -> float:
        """The log α at which P(z ≠ 0) is ``open_probability``: the inverse of eq. 12.

        Raises:
            UsageError: the probability is not strictly between 0 and 1.
        """
        return logit(open_probability) + self._shift

    @property
    def _shift(self) -> float:
        return float(reaches(0, self.beta, self.gamma, self.zeta))


def _coth_excess(x: Tensor) -> Tensor:
    """``x·coth(x) − 1``, and its gradient, without the poles that cancel at 0."""
    small = x.abs() < 0.1
    squared = torch.where(small, x, 0).square()
    # The Taylor series; the next term is below 1e-17.
    terms = (1 / 3, -1 / 45, 2 / 945, -1 / 4725, 2 / 93555)
    series = torch.zeros_like(x)
    for term in reversed(terms):
        series = (series + term) * squared
    safe = torch.where(small, 1, x)
    return torch.where(small, series, safe / safe.tanh() - 1)
