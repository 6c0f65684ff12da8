"""Penalties on single weights: the operators of the penalties on slots, for groups of one.

They act on each parameter of two or more dims that learns. Files store the zeros, except that a
slot is closed, and cut, when all weights that its gates multiply are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError
from l0prune.features.penalties.groups import GroupPenalty, check_unlearned, close, erase
from l0prune.features.penalties.gsm import SparseMomentum, check_decay, saliency
from l0prune.features.penalties.shrinkage import shrinkage_of
from l0prune.features.penalties.slot_groups import Groups, Metric
from l0prune.gating.attaching import holder, weights_of
from l0prune.gating.bank import Gates
from l0prune.running.processes import is_sharded
from l0prune.training.budget import RATE, Budget, ahead_of, ascended, passed_of
from l0prune.training.gate_settings import GateSettings
from l0prune.training.lambdas import Lambda
from l0prune.training.phases import Phases
from l0prune.training.start import stand

_EVERY = 10  # steps between two projections


def penalty_of(
    model: nn.Module,
    gates: Gates,
    settings: GateSettings,
    n: int | None,
    phases: Phases,
    budget: Budget | None,
) -> GroupPenalty | ElementPenalty:
    """Return the penalty that the settings name, for one run."""
    if settings.elements is not None:
        return ElementPenalty(model, gates, settings, n, phases)
    masks = getattr(shrinkage_of(str(settings.penalty)), "masks", False)
    kind = SparseMomentum if masks else GroupPenalty
    return kind(model, gates, settings, n, phases, budget)


class ElementPenalty:
    """Penalty on single weights, for one run; see ``GroupPenalty`` for its methods.

    If a share of the weights is asked for, the target sinks to it as that of a budget does, with a
    multiplier μ that rises while more are non-zero. Weights that the share would keep, by their
    sizes relative to the root mean square of their parameter, are not shrunk.
    """

    def __init__(
        self,
        model: nn.Module,
        gates: Gates,
        settings: GateSettings,
        n: int | None,
        phases: Phases,
    ) -> None:
        self._root, _ = holder(model)
        self._gates, self._phases = gates, phases
        check_unlearned(gates)
        if not bool(gates.open().all()):
            raise UsageError(
                "elements is about all weights of a model, and slots of this one are closed: "
                "l0prune.export it, and gate the result"
            )
        self._kind = shrinkage_of(str(settings.penalty))
        assert settings.elements is not None
        self._share, self._ramp = settings.elements, settings.ramp
        lam = Lambda.of(0.0 if settings.lam is None else settings.lam, n)
        if lam.rules:
            raise UsageError(
                "globs of λ are over axes, whose slots elements is not about: give one number"
            )
        self._lam = lam.default
        self._rate = (
            RATE / phases.learning if settings.budget_rate is None else settings.budget_rate
        )
        weights = self._weights()
        if not weights:
            raise UsageError("elements has nothing to shrink: no weights of this model learn")
        self._total = sum(weight.numel() for weight in weights)
        self._scales = [
            float(weight.detach().abs().float().square().mean().sqrt()) or 1.0 for weight in weights
        ]
        self._multiplier = torch.zeros(1)
        self._before: Tensor | None = None  # excess of the last step
        self._zeros: list[Tensor] | None = None
        stand(gates)

    def _weights(self) -> list[nn.Parameter]:
        """Return the parameters that are penalised, at the model's present size."""
        found = {id(p): p for p in weights_of(self._root).values()}
        weights = [p for p in found.values() if p.requires_grad and p.dim() > 1]
        if any(map(is_sharded, weights)):
            raise UsageError("a penalty on weights needs whole ones: use distributed='ddp'")
        return weights

    def _count(self, number: float) -> int:
        """Return the number of weights that may stay at this step."""
        share: float = self._share ** passed_of(number, self._ramp * self._phases.learning)
        return max(1, round(share * self._total))

    def _sizes(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return |w| relative to the usual size in its parameter, float32."""
        pairs = zip(weights, self._scales, strict=True)
        return [weight.detach().abs().float() / scale for weight, scale in pairs]

    @torch.no_grad()
    def before(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Before the optimizer's step, store which weights stay zero, or mask gradients."""
        weights = self._weights()
        if number >= self._phases.learning:
            self._zeros = [weight == 0 for weight in weights]
        elif getattr(self._kind, "masks", False):
            check_decay(optimizers)
            found = [*map(saliency, weights)]
            bound = _largest(found, self._count(number))
            for weight, salient in zip(weights, found, strict=True):
                if weight.grad is not None:
                    weight.grad.mul_(salient >= bound)

    @torch.no_grad()
    def step(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Shrink weights, or keep zeros, after the optimizer's step ``number``."""
        weights = self._weights()
        if number >= self._phases.learning:
            for weight, zero in zip(weights, self._zeros or (), strict=True):
                weight.masked_fill_(zero, 0)
            return
        if getattr(self._kind, "masks", False):
            return
        if getattr(self._kind, "projects", False) and self._share < 1:
            if number % _EVERY == 0:
                self._keep(weights, self._count(number))
        else:
            self._shrink(number, weights, Metric(optimizers))
        self._zeros = [weight == 0 for weight in weights]

    def _shrink(self, number: int, weights: Sequence[nn.Parameter], metric: Metric) -> None:
        """Apply the kind's operator, with each weight's stiffness under the optimizer."""
        pull = self._pull(number, weights)
        if metric.is_still or (pull == 0 and self._share < 1 and self._lam == 0):
            return
        sizes = self._sizes(weights)
        bound = _largest(sizes, self._count(self._phases.learning)) if self._share < 1 else None
        for weight, size, scale in zip(weights, sizes, self._scales, strict=True):
            t, h = size * scale, metric.at(weight)
            usual, spared = t.new_tensor(scale), self._spared(size, bound)
            if bound is None:
                price = pull * self._lam
            else:
                price = pull * float(h.mean()) * scale / self._phases.learning + self._lam
                usual = usual * bound / getattr(self._kind, "a", 1.0)
            x = self._kind.shrunk(t, price / h, usual.expand_as(t))
            ratio = torch.where(spared | (t == 0), 1.0, x / t)
            weight.mul_(ratio.to(weight.dtype))

    def _spared(self, size: Tensor, bound: Tensor | None) -> Tensor:
        """Return which weights of a parameter the share, or the kind, keeps from shrinking."""
        if bound is None:
            share = getattr(self._kind, "spares", None)
            if share is None:
                return torch.zeros_like(size, dtype=torch.bool)
            bound = _largest([size], max(1, round(share * size.numel())))
        return size >= bound

    def _pull(self, number: int, weights: Sequence[Tensor]) -> float:
        """Return the factor of λ at this step; with a share its μ, after an ascent."""
        if self._share == 1:
            return self._phases.factor(number)
        excess = torch.tensor([self._nonzero(weights) / self._count(number) - 1])
        ahead, self._before = ahead_of(excess, self._before), excess
        self._multiplier = ascended(self._multiplier, ahead, self._rate, torch.ones(1))
        return float(self._multiplier)

    def _keep(self, weights: Sequence[nn.Parameter], count: int) -> None:
        """Keep the ``count`` largest weights, and set the others to zero."""
        sizes = self._sizes(weights)
        bound = _largest(sizes, count)
        for weight, size in zip(weights, sizes, strict=True):
            weight.masked_fill_(size < bound, 0)

    @staticmethod
    def _nonzero(weights: Sequence[Tensor]) -> int:
        return sum(int(weight.count_nonzero()) for weight in weights)

    @torch.no_grad()
    def rank(self) -> str:
        """Meet the share, and close slots that have only zeros, before the weights settle.

        Returns a message.
        """
        weights = self._weights()
        for weight, zero in zip(weights, self._zeros or (), strict=self._zeros is not None):
            weight.masked_fill_(zero, 0)
        if self._share < 1:
            self._keep(weights, self._count(self._phases.learning))
        closed = self._close_dead()
        found = self._nonzero(weights)
        slots = f" {closed} slots have none, and are closed." if closed else ""
        share = f"{found:,} of {self._total:,} weights are not zero ({found / self._total:.2%})"
        return f"{share}.{slots} Files stay dense: the zeros of the slots that stay are in them"

    def _close_dead(self) -> int:
        """Close slots whose gates multiply only zeros, zero their weights, and return how many."""
        gates, groups = self._gates, Groups(self._root, self._gates)
        before = int(gates.open().sum())
        while bool((dead := self._dead(groups)).any()):
            erase(groups, dead)
            close(gates, dead)
        return before - int(gates.open().sum())

    def _dead(self, groups: Groups) -> Tensor:
        """Return open slots whose gates multiply only zeros; axes that must stay keep one."""
        read = groups.added([(part.parameter != 0).float() * part.is_read for part in groups.parts])
        open_ = self._gates.open()
        dead = open_ & groups.usable & (read == 0)
        for number, axis in enumerate(self._gates.plan.axes):
            left = open_[axis.slice] & ~dead[axis.slice]
            if number not in self._gates.plan.closing and not bool(left.any()):
                dead[axis.start + int(open_[axis.slice].float().argmax())] = False
        return dead

    def record(self) -> dict[str, Any]:
        """Return the number of weights that are not zero, for a record of the run."""
        return {"nonzero": self._nonzero(self._weights())}

    def state_dict(self) -> dict[str, Any]:
        """Return usual sizes, multiplier, last excess and zeros."""
        return {
            "scales": self._scales,
            "multiplier": self._multiplier,
            "before": self._before,
            "zeros": None if self._zeros is None else [zero.cpu() for zero in self._zeros],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self._scales, self._before = state["scales"], state["before"]
        self._multiplier = state["multiplier"]
        zeros, weights = state["zeros"], self._weights()
        if zeros is not None:
            self._zeros = [z.to(w.device) for z, w in zip(zeros, weights, strict=True)]


def _largest(values: Sequence[Tensor], count: int) -> Tensor:
    """Return the ``count``-th largest value over all tensors."""
    flat = torch.cat([value.flatten() for value in values])
    return flat.kthvalue(max(1, len(flat) - count + 1)).values
