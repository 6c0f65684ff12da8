"""What gates add to training: the penalty, a rate of their own, their rest, and their counts."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from l0prune.cost import CostModel
from l0prune.finetune.settings import Settings
from l0prune.gates import Gates
from l0prune.lambdas import Lambda
from l0prune.objective import param_groups, penalty


class Pruning:
    """The gates of one model in training.

    Attributes:
        gates: the bank.
        lam: λ with N filled in.

    Raises:
        UsageError: λ or the prior makes no sense, or names an axis that is not there.
    """

    def __init__(self, model: nn.Module, gates: Gates, settings: Settings, n: int) -> None:
        self._model = model
        self.gates = gates
        self.lam = Lambda.of(settings.lam, n)
        self._penalty = partial(penalty, model, counting=settings.counting)
        self._prior: dict[str, Any] = {"prior": settings.prior, "n": n}
        self._decay: dict[str, Any] = {"l2": settings.l2, "l2_detach": settings.l2_detach}
        self._penalty(self.lam, **self._prior)  # what makes no sense shows before training
        self._cost = CostModel(gates.plan)

    def param_groups(self, settings: Settings) -> list[dict[str, Any]]:
        """Weights and gates, each at their own rate."""
        return param_groups(self._model, settings.lr, settings.gate_lr, settings.weight_decay)

    def penalty(self, factor: float) -> Tensor | None:
        """``factor`` times λ·E‖θ‖₀ and what the gates say beyond their prior, and the L2 term in
        full; None where there is nothing to add.
        """
        if factor == 1:
            return self._penalty(self.lam, **self._prior, **self._decay)
        total = None
        if factor:
            total = factor * self._penalty(self.lam, **self._prior)
        if self._decay["l2"]:
            decay = self._penalty(0.0, **self._decay)
            total = decay if total is None else total + decay
        return total

    def fix(self, fixed: bool) -> None:
        """Make gates stand at their eval values, or let them be sampled."""
        self.gates.fixed = fixed

    def hold(self) -> None:
        """Drop the gates' gradient, so that no optimizer moves them."""
        self.gates.log_alpha.grad = None

    def record(self) -> dict[str, Any]:
        """Expected and actual counts, open slots by axis, and axes without an open gate."""
        p = self.gates.open_probability().detach()
        opened = self.gates.open().cpu()
        counts: dict[str, Any] = {}
        for unit in ("params", "macs"):
            counts[f"expected_{unit}"] = float(self._cost.expected(p, unit))
            counts[unit] = self._cost.actual(opened, unit)
            counts[f"dense_{unit}"] = self._cost.dense(unit)
        axes = self.gates.axes
        counts["open"] = {axis.name: int(axis.open.sum()) for axis in axes}
        counts["dead"] = [axis.name for axis in axes if not opened[axis.slice].any()]
        return counts
