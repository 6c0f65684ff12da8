"""The cost of the gates in the variational objective: what they say beyond a prior (eq. 21).

Under a spike-and-slab prior over weights and gates the variational free energy is (eq. 20)

    F = E_q(z)[−log p(D|θ, z)] + Σ KL(q(z)‖p(z)) + Σ q(z ≠ 0)·KL(q(θ|z ≠ 0)‖p(θ|z ≠ 0)),

one divergence for each gate and one for each weight that is there. λ·E‖θ‖₀ stands for the last
sum: with the weights at a point, each costs the same number of nats, λN where the loss is the
mean over N examples (eq. 21; eq. 22 drops the gates' own divergence as well, as a bound). A
Gaussian slab of variance τ² and a posterior of standard deviation r·τ around the weight W make
it exact: KL = (r²−1)/2 − log r + W²/(2τ²), hence λ = ((r²−1)/2 − log r)/N and l2 = 1/(N·τ²).

Here is the middle sum, with a prior that is a gate of the same kind (eq. 27 and 28).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from l0prune.cost.expected import precision
from l0prune.errors import UsageError
from l0prune.gating.kinds.base import Gate
from l0prune.plan.globs import per_axis
from l0prune.plan.plan import Plan

Prior = float | Mapping[str, float]
"""P(z ≠ 0) before any data are seen: for all gates, or by globs over axis names."""


@runtime_checkable
class HasDivergence(Protocol):
    """A gate whose divergence from another gate of its kind is known."""

    def divergence(self, log_alpha: Tensor, prior: Tensor) -> Tensor:
        """KL(q(z)‖p(z)) of each gate q from p at log α ``prior``, in nats; shape ``(gates,)``."""
        ...


class Divergence:
    """Σ KL(q(z)‖p(z)) over the gates of one plan, with the priors worked out once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._priors: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def total(self, log_alpha: Tensor, gate: Gate, prior: Prior) -> Tensor:
        """The sum in nats, a scalar of the dtype of ``log_alpha`` that autograd can differentiate.

        Args:
            log_alpha: flat, shape ``(plan.size,)``.
            gate: the kind of all gates.
            prior: P(z ≠ 0) under p; axes that no glob of a mapping matches have no prior, and
                their gates add nothing.

        Raises:
            UsageError: the kind of gate has no divergence, a probability is not strictly between
                0 and 1, or a glob matches no axis.
        """
        if not isinstance(gate, HasDivergence):
            raise UsageError(
                f"a prior needs gates whose divergence from it is known, and that of {gate.name} "
                "gates is not; hard_concrete gates have one"
            )
        items = tuple(prior.items()) if isinstance(prior, Mapping) else (("*", prior),)
        for _, probability in items:
            if not (isinstance(probability, float | int) and 0 < probability < 1):
                raise UsageError(
                    "prior is the probability that a gate is open before any data are seen, "
                    f"strictly between 0 and 1, not {probability!r}"
                )
        key = (gate, items, log_alpha.device)
        if key not in self._priors:
            chosen, at = self._worked_out(gate, prior)
            device = log_alpha.device
            self._priors[key] = chosen.to(device), at.to(device, precision(device))
        chosen, at = self._priors[key]
        own = log_alpha.to(at.dtype).index_select(0, chosen)
        return gate.divergence(own, at).sum().to(log_alpha.dtype)

    def _worked_out(self, gate: Gate, prior: Prior) -> tuple[Tensor, Tensor]:
        """The gates that have a prior, and its log α for each of them."""
        chosen: list[int] = []
        at: list[float] = []
        given = per_axis(self._plan, prior, None, "prior")
        for axis, probability in zip(self._plan.axes, given, strict=True):
            if probability is not None:
                chosen += range(axis.slice.start, axis.slice.stop)
                at += [gate.initial(probability)] * axis.size
        return torch.tensor(chosen, dtype=torch.int64), torch.tensor(at, dtype=torch.float64)
