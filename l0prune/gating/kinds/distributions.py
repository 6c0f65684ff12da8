"""The hard concrete distribution (eq. 10-12, 23-29) as a ``torch.distributions.Distribution``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numpy.polynomial.legendre import leggauss
from torch import Size, Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.kl import register_kl
from torch.distributions.utils import broadcast_all
from torch.nn.functional import logsigmoid

from l0prune.gating.kinds.hard_concrete import START, divergence, reaches
from l0prune.gating.kinds.hard_concrete import HardConcrete as Gate

# Gauss-Legendre, over the logits between which z is neither 0 nor 1: 1e-12 for β up to 4 and a
# stretch as narrow as a millionth.
_NODES = 128
_DEFAULT = Gate()


class HardConcrete(Distribution):
    """A variable in [0, 1] that is exactly 0 or exactly 1 with some probability.

    With logistic noise ℓ, ``z = clamp(σ((ℓ + log α)/β)·(ζ−γ) + γ, 0, 1)``, differentiable in all
    parameters. The measure that densities and the entropy refer to is the length within (0, 1) plus
    a unit at 0 and at 1.

    Args:
        log_alpha: location; the larger, the more often z is 1.
        beta: temperature, above 0; the lower, the more often z is 0 or 1.
        gamma: lower end of the stretch, below 0.
        zeta: upper end of the stretch, above 1.
        validate_args: see ``torch.distributions.Distribution``.

    Raises:
        ValueError: a parameter is out of its range.
    """

    arg_constraints = {  # noqa: RUF012
        "log_alpha": constraints.real,
        "beta": constraints.positive,
        "gamma": constraints.less_than(0.0),
        "zeta": constraints.greater_than(1.0),
    }
    support = constraints.unit_interval
    has_rsample = True

    def __init__(
        self,
        log_alpha: Tensor | float,
        beta: Tensor | float = START,
        gamma: Tensor | float = _DEFAULT.gamma,
        zeta: Tensor | float = _DEFAULT.zeta,
        validate_args: bool | None = None,
    ) -> None:
        self.log_alpha, self.beta, self.gamma, self.zeta = broadcast_all(
            log_alpha, beta, gamma, zeta
        )
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> HardConcrete:
        """Return a copy with more batch dims; see ``torch.distributions.Distribution``."""
        new: HardConcrete = self._get_checked_instance(HardConcrete, _instance)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        super(HardConcrete, new).__init__(Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Any = Size()) -> Tensor:  # noqa: B008
        """Samples with gradients for all parameters (eq. 10-12)."""
        shape = self._extended_shape(Size(sample_shape))
        epsilon = torch.finfo(self.log_alpha.dtype).eps
        return self._at(self.log_alpha.new_empty(shape).uniform_(epsilon, 1 - epsilon).logit())

    def icdf(self, value: Tensor) -> Tensor:
        """Return the least z with ``cdf(z)`` at ``value`` or above."""
        if self._validate_args and not bool(((value >= 0) & (value <= 1)).all()):
            raise ValueError("icdf is of probabilities, from 0 to 1")
        return self._at(value.logit())

    def _at(self, logistic: Tensor) -> Tensor:
        """z at this logistic noise, −∞ to ∞."""
        s = ((logistic + self.log_alpha) / self.beta).sigmoid()
        return (s * (self.zeta - self.gamma) + self.gamma).clamp(0, 1)

    def _logistic(self, z: Tensor | float) -> Tensor:
        """The logistic noise at which s̄ is z."""
        noise: Tensor = reaches(z, self.beta, self.gamma, self.zeta) - self.log_alpha
        return noise

    @property
    def mass_at_zero(self) -> Tensor:
        """P(z = 0)."""
        return self._logistic(0).sigmoid()

    @property
    def mass_at_one(self) -> Tensor:
        """P(z = 1)."""
        return (-self._logistic(1)).sigmoid()

    def log_prob(self, value: Tensor) -> Tensor:
        """The logarithm of the mass at 0 and at 1, and of the density between them (eq. 26)."""
        if self._validate_args:
            self._validate_sample(value)
        at_zero, at_one = logsigmoid(self._logistic(0)), logsigmoid(-self._logistic(1))
        between = self._log_density(value.clamp(0, 1))
        return torch.where(value <= 0, at_zero, torch.where(value >= 1, at_one, between))

    def _log_density(self, z: Tensor) -> Tensor:
        """log q(s̄) of eq. 23 and 25, within the stretch."""
        noise = self._logistic(z)
        # dz/dnoise = (z−γ)·(ζ−z)/((ζ−γ)·β), and the logistic density is σ·(1−σ).
        slope = (z - self.gamma) * (self.zeta - z) / ((self.zeta - self.gamma) * self.beta)
        return logsigmoid(noise) + logsigmoid(-noise) - slope.log()

    def cdf(self, value: Tensor) -> Tensor:
        """P(z ≤ value) (eq. 24)."""
        if self._validate_args:
            self._validate_sample(value)
        below = self._logistic(value.clamp(0, 1)).sigmoid()
        return torch.where(value < 0, 0.0, torch.where(value >= 1, 1.0, below))

    def expectation(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """E of a smooth function of z, by quadrature between the masses at 0 and 1.

        Args:
            value: of z, of shape ``(nodes, *batch_shape)``; elementwise.
        """
        begin, end = self._logistic(0), self._logistic(1)
        nodes, weights = (t.to(begin).view(-1, *[1] * begin.dim()) for t in _rule())
        half = (end - begin) / 2
        noise = begin + half * (1 + nodes)
        within = weights * half * noise.sigmoid() * (-noise).sigmoid() * value(self._at(noise))
        edges = value(torch.stack([torch.zeros_like(begin), torch.ones_like(begin)]))
        return self.mass_at_zero * edges[0] + self.mass_at_one * edges[1] + within.sum(0)

    @property
    def mean(self) -> Tensor:
        """E(z)."""
        return self.expectation(lambda z: z)

    @property
    def variance(self) -> Tensor:
        """E((z − E(z))²)."""
        mean = self.mean
        return self.expectation(lambda z: (z - mean).square())

    @property
    def median(self) -> Tensor:
        """The z below and above which half of the samples lie: ``icdf`` at ½."""
        return self._at(torch.zeros_like(self.log_alpha))

    def entropy(self) -> Tensor:
        """E(−log_prob), in nats."""
        return -self.expectation(self._unchecked_log_prob)

    def _unchecked_log_prob(self, z: Tensor) -> Tensor:
        """``log_prob`` at nodes of quadrature, without validating each value."""
        checks, self._validate_args = self._validate_args, False
        try:
            return self.log_prob(z)
        finally:
            self._validate_args = checks


@cache
def _rule() -> tuple[Tensor, Tensor]:
    nodes, weights = leggauss(_NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


@register_kl(HardConcrete, HardConcrete)
def _divergence(q: HardConcrete, p: HardConcrete) -> Tensor:
    """KL(q‖p): the closed form where both have the same β, γ and ζ, else by quadrature."""
    same = all(torch.equal(*torch.broadcast_tensors(getattr(q, n), getattr(p, n)))
               for n in ("beta", "gamma", "zeta"))  # fmt: skip
    if same:
        ends = (reaches(x, q.beta, q.gamma, q.zeta) for x in (0, 1))
        return divergence(q.log_alpha, p.log_alpha, *ends)
    return q.expectation(lambda z: q._unchecked_log_prob(z) - p._unchecked_log_prob(z))
