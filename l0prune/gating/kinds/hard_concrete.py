"""The hard concrete gate of Louizos, Welling & Kingma 2018 (arXiv 1712.01312), eq. 10-13."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import logsigmoid

from l0prune.capture.compat import functorch_is_active
from l0prune.errors import UsageError
from l0prune.gating.kinds.base import hard_sigmoid, logit, register
from l0prune.plan.expected import first_order

Number = float | Tensor
START = 2 / 3  # β, unless it is given; where one that learns begins


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
        beta: temperature of the concrete distribution, above 0; or ``"learn"``: it begins at 2/3
            and learns with the gates, and P(z ≠ 0) and all that counts it follow (eq. 12).
        gamma: lower end of the stretch, below 0, so that z is exactly 0 with some probability.
        zeta: upper end of the stretch, above 1, so that z is exactly 1 with some probability.
        estimator: z in eval mode. ``"paper"`` is eq. 13 and closes a gate whose P(z ≠ 0) is
            below 0.31 (at the default settings); ``"median"`` is the median of z and closes it
            below 0.5.
        beta_by: of a β that learns: one for ``"all"``, one for each ``"axis"`` or ``"slot"``.
        beta_min: lower bound of a β that learns.
        beta_max: upper bound of a β that learns.

    Raises:
        UsageError: a setting is outside its range.
    """

    name: ClassVar[str] = "hard_concrete"
    is_flat_at_zero: ClassVar[bool] = True

    beta: float | Literal["learn"] = START
    gamma: float = -0.1
    zeta: float = 1.1
    estimator: Literal["paper", "median"] = "paper"
    beta_by: Literal["all", "axis", "slot"] = "all"
    beta_min: float = 0.1
    beta_max: float = 2.0

    def __post_init__(self) -> None:
        self._check_beta()
        if not (-math.inf < self.gamma < 0 and 1 < self.zeta < math.inf):
            raise UsageError(
                "a hard concrete gate needs gamma < 0 and zeta > 1, or it is never exactly 0 or 1; "
                f"here gamma = {self.gamma}, zeta = {self.zeta}"
            )
        if self.estimator not in ("paper", "median"):
            raise UsageError(
                f"estimator must be 'paper' (eq. 13) or 'median', not {self.estimator!r}"
            )

    def _check_beta(self) -> None:
        if self.beta != "learn" and not 0 < self.beta < math.inf:
            raise UsageError(
                f"beta of a hard concrete gate must be above 0, or 'learn', not {self.beta!r}"
            )
        if self.beta_by not in ("all", "axis", "slot"):
            raise UsageError(f"beta_by must be 'all', 'axis' or 'slot', not {self.beta_by!r}")
        if not 0 < self.beta_min < START < self.beta_max < math.inf:
            raise UsageError(
                "a β that learns begins at 2/3, and its bounds lie around that: 0 < beta_min < 2/3 "
                f"< beta_max; here beta_min = {self.beta_min}, beta_max = {self.beta_max}"
            )

    def at(self, progress: float) -> HardConcrete:
        """Return this gate, which is the same throughout training."""
        return self

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """z of eq. 10-12: ``clamp(σ((log u − log(1−u) + log α)/β)·(ζ−γ) + γ, 0, 1)``.

        Args:
            log_alpha: flat, shape ``(gates,)``.
            noise: u of the same shape, strictly between 0 and 1.
        """
        return hard_sigmoid(log_alpha, noise.logit(), self._rate, self.gamma, self.zeta)

    def estimate(self, log_alpha: Tensor) -> Tensor:
        """ẑ of eq. 13, ``clamp(σ(log α)·(ζ−γ) + γ, 0, 1)``, or the median, with log α/β."""
        rate = 1.0 if self.estimator == "paper" else self._rate
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
        full = reaches(1, self._beta, self.gamma, self.zeta)
        return divergence(log_alpha, prior, self._shift, full)

    def initial(self, open_probability: float) -> float:
        """The log α at which P(z ≠ 0) is ``open_probability``: the inverse of eq. 12.

        Raises:
            UsageError: the probability is not strictly between 0 and 1.
        """
        return logit(open_probability) + float(self._shift)

    def temperature_start(self, sizes: Sequence[int]) -> Tensor | None:
        """Return the logit of each learned β's start within its bounds; None if β is fixed."""
        if self.beta != "learn":
            return None
        part = (START - self.beta_min) / (self.beta_max - self.beta_min)
        count = {"all": 1, "axis": len(sizes), "slot": sum(sizes)}[self.beta_by]
        return torch.full((count,), logit(part))

    def temperature_index(self, sizes: Sequence[int]) -> Tensor:
        """Return the index of each gate's β."""
        if self.beta_by == "slot":
            return torch.arange(sum(sizes))
        numbers = torch.arange(len(sizes)) if self.beta_by == "axis" else torch.zeros(len(sizes))
        return numbers.long().repeat_interleave(torch.tensor(sizes))

    def at_temperature(self, parameter: Tensor, index: Tensor) -> AtBeta:
        """Return the gate at each slot's β, differentiable; backward may run more than once."""
        beta, rate = bounded(parameter, index, self.beta_min, self.beta_max)
        return AtBeta(self, beta, rate)

    @property
    def _beta(self) -> Any:
        return START if self.beta == "learn" else self.beta

    @property
    def _rate(self) -> Any:
        return 1 / self._beta

    @property
    def _shift(self) -> Any:
        return reaches(0, self._beta, self.gamma, self.zeta)


class AtBeta(HardConcrete):
    """A hard concrete gate at learned values of β, shape ``(gates,)``."""

    __slots__ = ("_at", "_rates")
    _at: Tensor
    _rates: Tensor

    def __init__(self, gate: HardConcrete, beta: Tensor, rate: Tensor) -> None:
        for name in ("beta", "gamma", "zeta", "estimator", "beta_by", "beta_min", "beta_max"):
            object.__setattr__(self, name, getattr(gate, name))
        object.__setattr__(self, "_at", beta)
        object.__setattr__(self, "_rates", rate)

    @property
    def _beta(self) -> Tensor:
        return self._at

    @property
    def _rate(self) -> Tensor:
        return self._rates

    def initial(self, open_probability: float) -> float:
        """The log α at the β of the start, to which ``shift_learned`` is to be added."""
        return logit(open_probability) + float(reaches(0, START, self.gamma, self.zeta))

    @property
    def shift_learned(self) -> Tensor:
        """Summand to a log α of the start for the same P(z ≠ 0), shape ``(gates,)``."""
        moved: Tensor = self._shift - reaches(0, START, self.gamma, self.zeta)
        return moved

    def among(self, chosen: Tensor) -> AtBeta:
        """The gate for some of the slots."""
        return AtBeta(self, self._at[chosen], self._rates[chosen])


def bounded(parameter: Tensor, index: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """β = low + (high−low)·σ(parameter) of each gate, and 1/β.

    The backward pass may run any number of times over (see ``hard_sigmoid``).
    """
    if functorch_is_active():
        beta = (low + (high - low) * parameter.sigmoid())[index]
        return beta, 1 / beta
    beta, rate = _Bounded.apply(parameter, index, low, high)
    return beta, rate


class _Bounded(Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, index: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        s = parameter.sigmoid()
        beta = (low + (high - low) * s)[index]
        ctx.slope, ctx.index, ctx.beta = (high - low) * s * (1 - s), index, beta
        return beta, 1 / beta

    @staticmethod
    @first_order
    def backward(ctx: Any, of_beta: Tensor, of_rate: Tensor) -> tuple[Tensor | None, ...]:
        by_gate = of_beta - of_rate / ctx.beta.square()
        summed = torch.zeros_like(ctx.slope).index_add_(0, ctx.index, by_gate)
        return summed * ctx.slope, None, None, None


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
