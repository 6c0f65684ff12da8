"""A penalty on the weights of each slot: proximal steps after the optimizer's, and closed slots.

The group of a slot is the weights that write and read it: its elements of every parameter of two or
more dims, and of every parameter that its gates multiply. With t the root mean square of a group of
|g| weights and λ its price, the objective has λ·Σ|g|·p(t). For p(t) = t that is the group lasso's
λ·Σ√|g|·‖w‖. A weight between two slots belongs to both and is shrunk by both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError
from l0prune.features.penalties.shrinkage import GroupLasso, shrinkage_of
from l0prune.features.penalties.slot_groups import Groups, Metric, Part, squares
from l0prune.files.around import all_around
from l0prune.gating.attaching import holder
from l0prune.gating.bank import CLOSED, Gates
from l0prune.training.budget import Budget
from l0prune.training.gate_settings import GateSettings
from l0prune.training.lambdas import Lambda
from l0prune.training.phases import Phases
from l0prune.training.start import stand

_EVERY = 10  # steps between two looks at which groups a budget would keep
_ROUNDS = 20  # of Newton's method at most
_ENOUGH = 1e-5  # the relative change of a norm at which it has converged
# P(z ≠ 0) of open slots, the smallest and the largest, while they are ranked: z is 1 for all.
_RANKS = (0.99, 1 - 1e-4)


class GroupPenalty:
    """Penalty on the weight groups of slots, for one run."""

    def __init__(
        self,
        model: nn.Module,
        gates: Gates,
        settings: GateSettings,
        n: int | None,
        phases: Phases,
        budget: Budget | None,
    ) -> None:
        self._root, _ = holder(model)
        self._gates, self._phases, self._budget = gates, phases, budget
        self.kind = shrinkage_of(str(settings.penalty))
        for each in all_around(model):
            if each.scales_slots:
                raise UsageError(
                    f"this model has {each.words}, which scale what the weights of the same slots "
                    "compute, so that weights which shrink would say nothing of a slot: leave "
                    f"penalty out and give lam or a budget, or train without {each.words}"
                )
        check_unlearned(gates)
        self._groups = Groups(self._root, gates)
        if not bool(self._groups.usable.any()):
            raise UsageError("penalty has nothing to shrink: no weights of the gated slots learn")
        device = gates.log_alpha.device
        lam = Lambda.of(0.0 if settings.lam is None else settings.lam, n)
        sizes = torch.tensor([axis.size for axis in gates.plan.axes])
        prices = torch.tensor(lam.for_axes(gates.plan.names)).repeat_interleave(sizes)
        self._lam = prices.float().to(device)
        self._counts = self._groups.counts
        may_close = torch.zeros(gates.plan.size, dtype=torch.bool)
        for number in gates.plan.closing:
            may_close[gates.plan.axes[number].slice] = True
        self._may_close = may_close.to(device)
        self._scale = self._usual(self._sizes())
        self._spared: Tensor | None = None
        self._least = 1.0  # smallest size of a spared group, relative to the usual one
        stand(gates)

    def _now(self) -> Groups:
        """Return the groups at the model's present size."""
        if self._gates.kept is not self._groups.kept:
            self._groups = Groups(self._root, self._gates)
        return self._groups

    def _sizes(self) -> Tensor:
        """Return t of each group, float32."""
        return (self._now().sums(squares) / self._counts).sqrt()

    def _usual(self, t: Tensor) -> Tensor:
        """Return for each slot the mean t of the open slots of its axis."""
        found, open_ = torch.ones_like(t), self._gates.open()
        for axis in self._gates.plan.axes:
            known = t[axis.slice][open_[axis.slice]]
            if len(known) and bool((mean := known.mean()) > 0):
                found[axis.slice] = mean
        return found

    def before(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Hook before the optimizer's step, a no-op; penalties that mask gradients override it."""

    @torch.no_grad()
    def step(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Shrink the groups, and close those at zero, after the optimizer's step ``number``.

        Does nothing while the weights settle.
        """
        if number >= self._phases.learning:
            return
        pull = self._pull(number)
        if pull == 0 and self._budget is not None:
            return
        metric = Metric(optimizers)
        if metric.is_still:
            return
        t = self._sizes()
        if number % _EVERY == 0 or self._spared is None:
            self._spared = self._sparing(t)
        moves = self._groups.usable & self._gates.open() & ~self._spared
        if getattr(self.kind, "projects", False) and self._budget is not None:
            if number % _EVERY == 0:
                self._close(self._excessive(t, moves & ~self._last(t)), shrink=True)
            return
        lam = self._prices(pull, metric)
        if isinstance(self.kind, GroupLasso) and metric.is_adaptive:
            shrunk = _in_metric(self._groups, lam * moves * self._counts.sqrt(), metric)
        else:
            shrunk = self._isotropic(t, lam, moves, metric)
        zero = moves & (shrunk.sizes <= 0)
        if bool(zero.any()):
            zero &= ~self._last(t)
            zero = zero if self._budget is None else self._excessive(t, zero)
        kept = ((shrunk.sizes > 0) | zero).logical_not()  # at zero, and not to be closed
        ones = torch.ones_like(t)
        for part in self._groups.parts:
            factor = torch.where(self._groups.at(part, ones - kept.to(t)) > 0, shrunk.of(part), 1.0)
            factor = factor * self._groups.at(part, ones - zero.to(t))
            part.parameter.mul_(factor.to(part.parameter.dtype))
        self._close(zero)

    def _isotropic(self, t: Tensor, lam: Tensor, moves: Tensor, metric: Metric) -> _Shrunk:
        """Apply the kind's operator, with the mean stiffness of a group for all of its weights."""
        scale = self._scale
        if self._budget is not None:
            scale = scale * self._least / getattr(self.kind, "a", 1.0)
        x = self.kind.shrunk(t, lam / self._stiffness(metric), scale)
        x = torch.where(moves, x, t)
        ratio = torch.where(t > 0, x / t, 1.0)
        return _Shrunk(x, lambda part: self._groups.at(part, ratio))

    def _stiffness(self, metric: Metric) -> Tensor:
        return (self._groups.sums(metric.of) / self._groups.counts).clamp(min=1e-30)

    def _pull(self, number: int) -> float:
        """Return the factor of λ at this step; under a budget the sum of its μ after an ascent."""
        if self._budget is None:
            return self._phases.factor(number)
        self._budget.observe(self._gates.open())
        self._budget.step()
        return float(self._budget.multipliers.sum())

    def _prices(self, pull: float, metric: Metric) -> Tensor:
        """Return the present λ of each slot; μ = 1 closes groups of usual size within a run."""
        if self._budget is None:
            return pull * self._lam
        unit = self._stiffness(metric) * self._scale / self._phases.learning
        return pull * unit + self._lam

    def _last(self, t: Tensor) -> Tensor:
        """Return the largest open slot of each axis that may not close completely."""
        result, open_ = torch.zeros_like(self._may_close), self._gates.open()
        for axis in self._gates.plan.axes:
            if not bool(self._may_close[axis.slice].any()):
                result[axis.start + int(torch.where(open_, t, -1.0)[axis.slice].argmax())] = True
        return result

    def _excessive(self, t: Tensor, candidates: Tensor, *, in_the_end: bool = False) -> Tensor:
        """Return the fewest of these slots, smallest first, without which the budget is met.

        All of them if the budget is not met even then.
        """
        assert self._budget is not None
        order = self._in_order(t, candidates)
        now = self._gates.open().cpu()

        def meets(count: int) -> bool:
            open_ = now.clone()
            open_[order[:count]] = False
            return self._budget.meets(open_, in_the_end=in_the_end)  # type: ignore[union-attr]

        fewest = bisect_left(range(len(order)), True, key=meets)
        result = torch.zeros_like(candidates)
        result[order[:fewest].to(result.device)] = True
        return result

    def _in_order(self, t: Tensor, candidates: Tensor) -> Tensor:
        """Return the slots' numbers by size relative to the usual of their axis, smallest first."""
        numbers = candidates.nonzero().flatten()
        return numbers[(t / self._scale)[numbers].argsort(stable=True)].cpu()

    def _sparing(self, t: Tensor) -> Tensor:
        """Return the slots not to shrink in the next steps: those that the budget or kind keeps."""
        spared = torch.zeros_like(self._may_close)
        open_ = self._gates.open()
        if self._budget is not None:
            spared = open_ & ~self._excessive(t, open_ & self._groups.usable, in_the_end=True)
            if bool((kept := spared & self._groups.usable).any()):
                self._least = float((t / self._scale)[kept].min())
        elif (share := getattr(self.kind, "spares", None)) is not None:
            for axis in self._gates.plan.axes:
                most = t[axis.slice].argsort(descending=True)[: round(share * axis.size)]
                spared[axis.start + most] = True
        return spared

    def _close(self, slots: Tensor, *, shrink: bool = False) -> None:
        """Close these slots for good; with ``shrink`` set their weights to zero first."""
        if not bool(slots.any()):
            return
        if shrink:
            erase(self._groups, slots)
        close(self._gates, slots)

    @torch.no_grad()
    def rank(self) -> str:
        """Rank open gates by the sizes of their groups, before the gates are fitted.

        Returns a message, or an empty string.
        """
        gates = self._gates
        order = self._in_order(self._sizes(), gates.open()).to(gates.log_alpha.device)
        low, high = (gates.initial(p)[order] for p in _RANKS)
        part = torch.linspace(0, 1, len(order), dtype=low.dtype, device=low.device)
        gates.log_alpha[order] = (low + part * (high - low)).to(gates.log_alpha)
        return ""

    def record(self) -> dict[str, Any]:
        """Return the entries of a record of the run, beside those of gates."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return usual sizes, spared slots and their smallest relative size."""
        return {"scale": self._scale, "spared": self._spared, "least": self._least}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self._scale = state["scale"].to(self._scale)
        self._spared = None if (kept := state["spared"]) is None else kept.to(self._may_close)
        self._least = state["least"]


def check_unlearned(gates: Gates) -> None:
    """Raise UsageError for gates that multiply by anything but 0 and 1."""
    z = gates.z()
    if bool(((z > 0) & (z != 1)).any()):
        raise UsageError(
            "this model has gates that have learned, and a penalty on the weights of the same "
            "slots cannot be added to them: leave penalty out, or ungate the model and gate it "
            "anew"
        )


def close(gates: Gates, slots: Tensor) -> None:
    """Close these slots for good."""
    closed = gates.initial(CLOSED).to(gates.log_alpha)
    gates.log_alpha.copy_(torch.where(slots, closed, gates.log_alpha))


def erase(groups: Groups, slots: Tensor) -> None:
    """Make the weights of these slots zero."""
    for part in groups.parts:
        part.parameter.mul_(groups.at(part, 1 - slots.float()).to(part.parameter.dtype))


class _Shrunk(NamedTuple):
    """Result of an operator: sizes of groups, 0 to zero them, and factors of a part's elements."""

    sizes: Tensor
    of: Callable[[Part], Tensor]


def _in_metric(groups: Groups, prices: Tensor, metric: Metric) -> _Shrunk:
    """Apply the group lasso's operator with a stiffness h for each weight, as under Adam.

    ½·Σhᵢ(wᵢ − vᵢ)² + λ√|g|·‖w‖ is least where wᵢ = hᵢ·r·vᵢ/(hᵢ·r + λ√|g|) with r = ‖w‖, so that
    φ(r) = Σ(hᵢ·vᵢ/(hᵢ·r + λ√|g|))² = 1. Newton's method on 1/√φ, which is concave, nearly straight
    and rises, finds r from 0 on and never passes it; where φ(0) ≤ 1 the group is zero.
    """
    pays = prices > 0
    price = torch.where(pays, prices, 1.0)
    r = torch.zeros_like(prices)
    known = [(metric.of(part), squares(part), groups.at(part, price)) for part in groups.parts]
    for _ in range(_ROUNDS):
        at = [groups.at(part, r) for part in groups.parts]
        ratios = [h / (h * own + pay) for (h, _, pay), own in zip(known, at, strict=True)]
        terms = [q * ratio * ratio for (_, q, _), ratio in zip(known, ratios, strict=True)]
        phi = groups.added(terms)
        slope = 2 * groups.added([term * ratio for term, ratio in zip(terms, ratios, strict=True)])
        change = 2 * (phi.sqrt() - 1) * (phi / slope)
        change = torch.where(pays & (phi > 1), change, 0.0).nan_to_num(0.0)
        r = r + change
        if bool((change <= _ENOUGH * r).all()):
            break

    def factor(part: Part) -> Tensor:
        h, own = metric.of(part), groups.at(part, r)
        shrunk = h * own / (h * own + groups.at(part, price))
        return torch.where(groups.at(part, pays.to(r)) > 0, shrunk, 1.0)

    return _Shrunk(torch.where(pays, r, 1.0), factor)
