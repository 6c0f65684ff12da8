"""Terms that gates add to the objective (penalty, budgets), their learning rate, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.bank import Gates
from l0prune.plan.cost import CostModel
from l0prune.plan.measures import Macs, Measure, Params
from l0prune.plan.switches import idle, switches_of
from l0prune.running.processes import redistribute_like
from l0prune.running.task import RECORD_KEYS, Amount
from l0prune.selection import fitted
from l0prune.selection.fit import blocks_for, fit
from l0prune.training.budget import Budget
from l0prune.training.gate_settings import GateSettings
from l0prune.training.lambdas import Lambda
from l0prune.training.penalty import penalty_of_gates
from l0prune.training.phases import Phases

LAMBDA = "0.1/N"  # without λ, budget or penalty in the settings
ALWAYS = (Params, Macs)  # measures that every run records
_MOST_WIDER = 4  # axes that are named
_TRAVEL = 120.0
BINS = 20  # of open probabilities, from 0 to 1
_FASTEST = 0.3


def default_gate_rate(steps: int) -> float:
    """Return the gates' default learning rate for ``steps`` steps in which they learn.

    From nearly open to closed is about 5.4 in log α. A step of Adam moves a gate by up to the
    rate: with this one, gates can cross that distance in both directions many times, but do not
    saturate in the first part of the run, when nothing is known about them yet.
    """
    return min(_FASTEST, _TRAVEL / max(steps, 1))


class GateTerms:
    """Terms of a training objective from the gates of one model.

    Attributes:
        lam: λ with N filled in.
        learns: whether gates learn; else the weights of their slots pay a penalty.
        fitted: how the widths were chosen when settling began, as plain data; empty before, and
            if there was nothing to report.
    """

    def __init__(
        self, model: nn.Module, gates: Gates, settings: GateSettings, n: int | None, phases: Phases
    ) -> None:
        self._model, self._settings, self._phases = model, settings, phases
        self.gates = gates
        self.lam = Lambda.of(_lambda(settings), n)
        self.learns = settings.penalty is None
        self._priced = self.lam != Lambda(0.0) or settings.prior is not None
        self._penalty = partial(penalty_of_gates, model, counting=settings.counting)
        self._prior: dict[str, Any] = {"prior": settings.prior, "n": n}
        self._decay: dict[str, Any] = {"l2": settings.l2, "l2_detach": settings.l2_detach}
        self._penalty(self.lam, **self._prior)  # raises errors of settings before training
        self._bit_price = self._price_of_bits()
        self.budget = self._budget()
        self._blocks: list[int] = []
        if self.budget is None:
            self._blocks = blocks_for(
                gates.plan, (), settings.round_to, settings.latency, target=settings.target
            )
        self._measures = self._recorded()
        self.fitted: dict[str, Any] = {}

    def _budget(self) -> Budget | None:
        settings = self._settings
        if settings.budget is None:
            return None
        budget = Budget(
            self._model,
            settings.budget,
            steps=self._phases.learning,
            rate=settings.budget_rate,
            ramp=settings.ramp,
            round_to=settings.round_to,
            target=settings.target,
            latency=settings.latency,
        )
        self.gates.asked = tuple(map(str, budget.limits))
        return budget

    def _price_of_bits(self) -> CostModel | None:
        quantizer = self.gates.quantizer
        if not self._settings.bits_lam or quantizer is None:
            return None
        return quantizer.price(self.gates.plan)

    def _recorded(self) -> dict[str, Measure]:
        """Return the measures that are recorded, by name: params, MACs and those of the budget."""
        plan = self.gates.plan
        measures: list[Measure] = [kind(plan) for kind in ALWAYS]
        if self.budget is not None:
            measures += [bound.measure for bound in self.budget.bounds]
        for measure in measures:
            if measure.name in RECORD_KEYS:
                raise UsageError(
                    f"a measure cannot be called {measure.name!r}, since the records of a run have "
                    "something else of that name"
                )
        return {measure.name: measure for measure in measures}

    @property
    def gate_lr(self) -> float:
        """The gates' learning rate."""
        given = self._settings.gate_lr
        return default_gate_rate(self._phases.learning) if given is None else given

    @property
    def weight(self) -> float:
        """Norm of the budgets' gradient for log α, at multipliers of 1, over that of the loss."""
        return 0.0 if self.budget is None else self.budget.weight

    @property
    def decays(self) -> bool:
        """Return whether the penalty has an L2 term, which depends on the weights."""
        return bool(self._decay["l2"])

    def penalty(self, step: int) -> Tensor | None:
        """Return the gates' addition to the loss of a step; None where there is none.

        λ·E‖θ‖₀, the price of bits and the divergence from the prior, times the warm-up factor of λ;
        the budgets' part except while settling; and the L2 term in full.
        """
        factor = self._phases.factor(step)
        parts: list[Tensor] = []
        if self._priced and factor == 1:
            parts.append(self._penalty(self.lam, **self._prior, **self._decay))
        else:
            if self._priced and factor:
                parts.append(factor * self._penalty(self.lam, **self._prior))
            if self.decays:
                parts.append(self._penalty(0.0, **self._decay))
        if self._bit_price is not None and factor:
            p = self.gates.open_probability()
            price = self._bit_price.expected(p, "bits", dtype=p.dtype)
            parts.append(factor * self._settings.bits_lam * price)
        if self.budget is not None and self._phases.at(step) != "settle":
            parts.append(self._penalty(self.budget))
        return sum(parts[1:], parts[0]) if parts else None

    def pull(self, path: Tensor) -> float | None:
        """Return the largest gradient of λ's penalty for any gate on a ``path`` of log α.

        None under a budget, whose multiplier grows until it is met.
        """
        if self.budget is not None:
            return None
        log_alpha = self.gates.log_alpha
        (pulls,) = torch.autograd.grad(self._penalty(self.lam), log_alpha)
        per_chance = pulls / self._slope(log_alpha.detach()).clamp(min=1e-12)
        return float(per_chance.max() * self._slope(path.to(log_alpha)).max())

    def _slope(self, log_alpha: Tensor) -> Tensor:
        """Return dP(z ≠ 0)/d log α of each gate."""
        at = log_alpha.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.gates.gate_now.open_probability(at).sum(), at)
        return slope

    def fit(self) -> str:
        """Fit the gates, before they are fixed, so that an export just meets the budgets.

        Returns:
            Which axes are wider than before and why; empty if none is.
        """
        asked, before = self._settings, self.gates.open().cpu()
        with fitted.watched(self._note):
            if self.budget is not None:
                self.budget.fit(fill=self.learns and not self._priced)
            elif asked.elements is None and max(self._blocks, default=1) > 1:
                widths: Any = {"round_to": asked.round_to, "target": asked.target}
                fit(self._model, **widths, latency=asked.latency)
        return self._opened_again(before)

    def _opened_again(self, before: Tensor) -> str:
        now, plan = self.gates.open().cpu(), self.gates.plan
        open_ = ((a.name, int(before[a.slice].sum()), int(now[a.slice].sum())) for a in plan.axes)
        wider = [f"{name} {old:,} → {new:,}" for name, old, new in open_ if new > old]
        if not wider:
            return ""
        has_filling = bool(self.fitted.get("filling"))
        reasons = ["widths are whole blocks of the runtime (round_to)"] * has_filling
        if self.budget is not None:
            reasons.append("the budget leaves room for the likeliest slots")
        more = f" and {len(wider) - _MOST_WIDER} more" if len(wider) > _MOST_WIDER else ""
        shares = (
            f"{name} {measure.actual(before) / dense:.1%} → {measure.actual(now) / dense:.1%}"
            for name, measure in self._measures.items()
            if (dense := measure.dense())
        )
        return (
            f"the gates are fixed from here on, and slots open again, as "
            f"{' and '.join(reasons) or 'widths are rounded up'}: "
            f"{', '.join(wider[:_MOST_WIDER])}{more}; in all {', '.join(shares)}"
        )

    def _note(self, found: fitted.Fitted) -> None:
        self.fitted = found.to_dict() if found.filling or found.looks else {}

    def record(self) -> dict[str, Any]:
        """Return amounts, open slots by axis, dead axes, a histogram of P(z ≠ 0) and ``fitted``."""
        p = self.gates.open_probability().detach()
        opened = self.gates.open().cpu()
        counts: dict[str, Any] = {}
        for name, measure in self._measures.items():
            expected, actual = float(measure.expected(p)), measure.actual(opened)
            counts |= Amount(expected, actual, measure.dense()).entries(name)
        if self.budget is not None:
            counts["budget"] = self.budget.report(opened)
        axes = self.gates.axes
        counts["open"] = {axis.name: int(axis.open.sum()) for axis in axes}
        plan = self.gates.plan
        choosable = switches_of(plan) | idle(plan, plan.kept(opened))
        counts["dead"] = [axis.name for axis in axes if not (opened | choosable)[axis.slice].any()]
        counts["gates"] = [int(n) for n in torch.histc(p.float().cpu(), BINS, 0, 1)]
        if self.fitted:
            counts["fitted"] = self.fitted
        return counts


def _lambda(settings: GateSettings) -> Any:
    if settings.penalty is not None:
        return 0.0
    if settings.lam is not None:
        return settings.lam
    return LAMBDA if settings.budget is None else 0.0


def add_gradients(loss: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add the gradients of ``loss`` to those of the parameters.

    This bypasses DDP, which would take the parameters for ones that the next batch needs.
    """
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        gradient = redistribute_like(gradient, parameter)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad.add_(gradient)
