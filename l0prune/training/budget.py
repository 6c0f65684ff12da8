"""Budget constraints, each with a Lagrange multiplier that rises while its budget is exceeded.

With ``g(φ) = E[count]/target − 1``, the relative excess of a network with gates φ over its target,
the loss is

    L(θ, φ) + Σ μᵢ·gᵢ(φ),    μᵢ ≥ 0,

which weights and gates descend and multipliers ascend (Gallego-Posada et al. 2022). A multiplier
is reset to 0 once its budget is met, so that a network that is small enough shrinks no further.

Gates have momentum: a push that lasts until the budget is met carries them far beyond, and gates
that are closed by then hardly reopen. So a multiplier ascends by the excess some steps ahead,
extrapolated from its last change: the derivative term of a PID controller (Stooke et al. 2020 use
all three terms).

Excess and loss have different units, and the gradient of either for log α may be a thousand times
the larger. ``Balance`` estimates the ratio of the two norms every few steps.

Where widths are multiples of eight, a layer with three open channels is exported with eight, and
other layers lose slots for it after training, regardless of the loss. So the slots of a block share
one log α, and the likeliest block of each axis is counted as certain to stay open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.attaching import gates_of
from l0prune.plan.limits import LimitsLike, limits, warn_of_little
from l0prune.plan.measures import Source
from l0prune.plan.numbers import check_number, check_whole
from l0prune.plan.plan import Axis, Plan
from l0prune.plan.switches import switches_of
from l0prune.plan.targets import TARGET
from l0prune.selection.fit import blocks_for, bounds_of, meet, table_if_needed, unmet
from l0prune.selection.fitting import Movable, Widths

_EVERY = 10  # steps between two estimates of the gradients' ratio
_KEPT = 0.9  # weight of earlier estimates
_ROUNDING = 1e-4  # of the budgets' gradient: a smaller gradient of the loss is rounding
# Rate of ascent times the number of steps.
RATE = 500.0
# Excess is clamped to this share of the target.
_FAR = 0.1
_LARGEST = 1e6
# Steps of extrapolation: Adam's first moment (β₁ = 0.9) is a mean over about as many.
_AHEAD = 10


class Budget:
    """The budgets of one gated model, with their multipliers.

    In a training loop of your own::

        budget = l0prune.Budget(model, "macs=0.5", steps=1000)
        for inputs, targets in batches:
            loss = task_loss(model(inputs), targets) + l0prune.penalty(model, budget)
            loss.backward()
            budget.step()
            optimizer.step()
            optimizer.zero_grad()
        budget.fit()     # now an export meets it; go on training with l0prune.gates(model).fixed

    Attributes:
        limits: what is limited.
        bounds: the limits on this network.
        blocks: for each axis, how many slots open and close together.
        multipliers: μ of each, in units of the loss per share of the target.
        done: steps done.

    Args:
        model: a gated model.
        wanted: such as ``"macs=0.5"``, ``{"params": 0.1}``, ``"latency=12ms"``,
            ``"layer3.*: params=0.3"``, or several.
        steps: in which the gates learn.
        rate: of ascent: a step adds ``rate·g``, g foreseen, of what pulls at the gates as hard as
            the loss does; None to choose it by ``steps``.
        ramp: part of the steps in which the target sinks to the budget, from what an export of
            the model has now.
        round_to, target: open slots of an axis come in multiples of this, or of what this runtime
            computes fastest; see ``fit``.
        latency: a table of times, for a budget in latency, or for ``round_to``.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a budget makes no sense, or cannot be met.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: LimitsLike,
        *,
        steps: int,
        rate: float | None = None,
        ramp: float = 0.6,
        round_to: Widths = "auto",
        target: str = TARGET,
        latency: Source | None = None,
    ) -> None:
        check_whole("steps", steps)
        check_number("ramp", ramp, most=1)
        self._model, self._gates = model, gates_of(model)
        self.limits = limits(wanted)
        self._steps, self._ramp = steps, ramp
        self._rate = RATE / steps if rate is None else rate
        plan = self._gates.plan
        latency = table_if_needed(model, self.limits, latency, target)
        self.bounds = bounds_of(model, self.limits, latency)
        self.blocks = blocks_for(plan, self.bounds, round_to, latency, target=target)
        warn_of_little(plan, self.bounds)
        self._shares = torch.tensor([bound.share for bound in self.bounds])
        self._begins = torch.maximum(self._shares_now(self._gates.open()), self._shares)
        self.multipliers = torch.zeros(len(self.bounds))
        self.done = 0
        self._excess: Tensor | None = None
        self._before: Tensor | None = None
        self._block_coupling: BlockCoupling | None = None
        self._balance = Balance()

    def lagrangian(self, p: Tensor) -> Tensor:
        """Return Σ μᵢ·gᵢ at open probabilities ``p``, shape ``(gates,)``; a scalar of p's dtype."""
        if self.multipliers.device != p.device:  # once: later steps transfer nothing
            self.multipliers = self.multipliers.to(p.device)
            self._shares, self._begins = self._shares.to(p.device), self._begins.to(p.device)
            if self._block_coupling is not None:
                self._block_coupling.move(p.device)
        excess = self.share_of_targets(p) - 1
        self._excess = excess.detach()
        self._balance.look(self.done, self._gates.log_alpha, excess)
        return torch.dot(self.multipliers.to(p.dtype), excess)

    def share_of_targets(self, p: Tensor) -> Tensor:
        """Return the ratio of expected amount to current target, at open probabilities ``p``.

        Shape: p ``(gates,)``; result ``(k,)``, of p's dtype.
        """
        counted = p if self._block_coupling is None else self._block_coupling.least(p)
        shares = torch.stack([bound.expected_share(counted) for bound in self.bounds])
        return shares / self.targets.to(p)

    @property
    def targets(self) -> Tensor:
        """The share of the dense amount that each budget allows at this step; shape ``(k,)``.

        Targets decay geometrically over the ramp: cutting 40 % of a small network is as hard as
        40 % of a large one, and takes as long. They start at the share that an export had when the
        budget was made, if that is larger.
        """
        passed = passed_of(self.done, self._ramp * self._steps)
        return self._begins ** (1 - passed) * self._shares**passed

    def observe(self, open_: Tensor) -> None:
        """Set the excess from an export with these open gates, bool and flat, not an expectation.

        For runs whose gates have no gradient, before ``step``.
        """
        self._excess = self._shares_now(open_).to(self.targets) / self.targets - 1

    def meets(self, open_: Tensor, *, in_the_end: bool = False) -> bool:
        """Return whether an export with these open gates, bool and flat, is within the targets.

        The targets are those of this step; if ``in_the_end``, the budgets themselves.
        """
        targets = self._shares if in_the_end else self.targets
        return bool((self._shares_now(open_).to(targets) <= targets).all())

    def _shares_now(self, open_: Tensor) -> Tensor:
        return torch.tensor([*self.shares(open_.cpu()).values()])

    @property
    def weight(self) -> float:
        """Norm of the budgets' gradient for log α, at multipliers of 1, over that of the loss."""
        return float(self._balance.weight)

    def shares(self, open_: Tensor) -> dict[str, float]:
        """Return an export's share of the dense amount for each limit, keyed by its text."""
        return {str(bound.limit): bound.actual_share(open_) for bound in self.bounds}

    @torch.no_grad()
    def step(self, scale: float | Tensor = 1.0) -> None:
        """Update the multipliers, between ``loss.backward()`` and the optimizer's step.

        The gradient of the gates keeps its direction and is scaled to about the norm that the loss
        alone gives it. Otherwise an adaptive optimizer, which remembers earlier norms, would stall
        while multipliers are large, or once they are back at 0.

        The slots of a block get one log α, and the mean gradient of the block, unless all gates
        start equal.

        Args:
            scale: factor on the gradients, where a loss scaler is not yet undone.

        Raises:
            UsageError: this step's loss did not include this budget.
        """
        if self._excess is None:
            raise UsageError(
                "this budget was not part of the last loss: add l0prune.penalty(model, budget)"
            )
        gates = self._gates
        log_alpha, gradient = gates.log_alpha, gates.log_alpha.grad
        is_coupled = max(self.blocks, default=1) > 1 or gates.plan.equally_wide
        if self.done == 0 and is_coupled and not gates.are_uniform():
            self._block_coupling = BlockCoupling(gates.plan, self.blocks, log_alpha)
            log_alpha.copy_(self._block_coupling.mean(log_alpha))
        if gradient is not None:
            self._balance.weigh(self.done, gradient / scale, self.multipliers)
            smaller = 1 + self.multipliers.sum() * self._balance.weight
            gradient /= smaller
            if gates.temperature is not None and gates.temperature.grad is not None:
                gates.temperature.grad /= smaller
            if self._block_coupling is not None:
                gradient.copy_(self._block_coupling.mean(gradient))
        unit = 1 / self._balance.weight
        excess = self._excess.float()
        ahead = ahead_of(excess, self._before)
        self.multipliers = ascended(self.multipliers, ahead, self._rate, unit)
        self._before, self._excess = excess, None
        self.done += 1

    def fit(self, *, fill: bool = True) -> dict[str, float]:
        """Open and close the last gates so that an export just meets the budget (``l0prune.fit``).

        Branches stay as they were decided, unless no choice of slots meets the budget then.

        Args:
            fill: open more slots where there is room; else a smaller network may stay smaller.

        Returns:
            The amounts of the exported model, for each limit by its text.
        """
        plan, worth = self._gates.plan, self._gates.log_alpha.detach()
        slots = Movable.of(~switches_of(plan), self._gates.open().cpu())
        movable = slots if unmet(plan, self.bounds, self.blocks, slots) is None else None
        return meet(self._model, self.bounds, worth, self.blocks, fill=fill, movable=movable)

    def report(self, open_: Tensor) -> dict[str, dict[str, float]]:
        """Return limit, target and actual share of the dense amount, and multiplier, by budget."""
        return {
            str(bound.limit): {
                "limit": bound.share,
                "target": float(target),
                "share": bound.actual_share(open_),
                "multiplier": float(multiplier),
            }
            for bound, target, multiplier in zip(
                self.bounds, self.targets, self.multipliers, strict=True
            )
        }

    def state_dict(self) -> dict[str, Any]:
        """Return multipliers, steps, balance, initial targets, last excess, blocks and widths."""
        return {
            "multipliers": self.multipliers.cpu(),
            "done": self.done,
            "weight": self._balance.weight.cpu(),
            "begins": self._begins.cpu(),
            "excess": None if self._before is None else self._before.cpu(),
            "blocks": None if self._block_coupling is None else self._block_coupling.numbers.cpu(),
            "widths": self.blocks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self.multipliers = state["multipliers"].to(self.multipliers.device)
        self.done = state["done"]
        self._before = state["excess"]
        self._begins = state["begins"].to(self._shares)
        self._balance.weight = state["weight"]
        self.blocks = list(state["widths"])
        if (numbers := state["blocks"]) is not None:
            self._block_coupling = BlockCoupling(
                self._gates.plan, self.blocks, -numbers.to(self.multipliers.device)
            )


class Balance:
    """Ratio of the gradient norms for log α: that of all excesses over that of the loss.

    The ``weight`` is an exponentially weighted geometric mean of the estimates.
    """

    def __init__(self) -> None:
        self.weight = torch.tensor(1.0)
        self._pulls: Tensor | None = None

    def look(self, done: int, log_alpha: Tensor, excess: Tensor) -> None:
        """Store the gradients of ``excess``, shape ``(k,)``, for log α at every tenth step."""
        if done % _EVERY == 0 and excess.requires_grad:
            pulls = (
                torch.autograd.grad(each, log_alpha, retain_graph=True)[0]
                for each in excess.unbind()
            )
            self._pulls = torch.stack([*pulls])

    def weigh(self, done: int, gradient: Tensor, multipliers: Tensor) -> None:
        """Update the weight after ``look`` by the gradient of loss and budgets for log α.

        No device synchronisation. If either gradient is close to zero, the weight is unchanged.
        """
        if self._pulls is None:
            return
        priced = multipliers.to(self._pulls.dtype) @ self._pulls
        of_loss = (gradient - priced).norm()
        found = self._pulls.sum(0).norm() / of_loss
        weight = self.weight.to(found)
        mean = found if done == 0 else weight**_KEPT * found ** (1 - _KEPT)
        is_told = (found > 0) & (of_loss > _ROUNDING * priced.norm())
        self.weight = torch.where(is_told, mean, weight)
        self._pulls = None


class BlockCoupling:
    """Blocks of slots that open and close together, each of slots with similar worth.

    Across axes that keep equally many slots, blocks of one rank are the same block.

    Attributes:
        numbers: index of each slot's block, shape ``(plan.size,)``.

    Args:
        worth: key by which slots are sorted into blocks, shape ``(plan.size,)``. The blocks are
            kept on the same device.
    """

    def __init__(self, plan: Plan, blocks: Sequence[int], worth: Tensor) -> None:
        order = worth.detach().cpu()
        numbers, axes = (torch.zeros(plan.size, dtype=torch.long) for _ in range(2))
        stays = torch.zeros(plan.size, dtype=torch.bool)
        for number, (axis, block) in enumerate(zip(plan.axes, blocks, strict=True)):
            numbers[axis.slice] = axis.start + _ranks(order, axis) // block
            axes[axis.slice] = number
            stays[axis.slice] = block > 1 and number not in plan.closing
        for first, *others in plan.equally_wide:
            start, size = plan.axes[first].start, plan.axes[first].size
            of_rank = torch.empty(size, dtype=torch.long)
            of_rank[_ranks(order, plan.axes[first])] = numbers[start : start + size]
            for other in others:
                numbers[plan.axes[other].slice] = of_rank[_ranks(order, plan.axes[other])]
        self._count = len(plan.axes)
        self.numbers, self._axes, self._stays = numbers, axes, stays
        self._sizes = numbers.bincount(minlength=plan.size)[numbers]
        self.move(worth.device)

    def move(self, device: torch.device) -> None:
        """Move the blocks to this device, so that no step has to transfer them."""
        self.numbers, self._axes = self.numbers.to(device), self._axes.to(device)
        self._stays, self._sizes = self._stays.to(device), self._sizes.to(device)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over its block for each slot; shape ``(plan.size,)``."""
        sums = torch.zeros_like(values).index_add(0, self.numbers, values)
        return sums[self.numbers] / self._sizes

    def least(self, p: Tensor) -> Tensor:
        """Return ``p`` with 1 for the block of each axis that is likeliest to stay open.

        Axes that may close completely, and those without blocks, are unchanged.
        """
        now = p.detach()
        most = now.new_zeros(self._count).scatter_reduce(0, self._axes, now, "amax")[self._axes]
        return torch.where(self._stays & (now >= most), 1.0, p)


def _ranks(worth: Tensor, axis: Axis) -> Tensor:
    """Return the rank of each slot of an axis, the best first; shape ``(axis.size,)``."""
    return worth[axis.slice].argsort(descending=True, stable=True).argsort()


def passed_of(done: float, length: float) -> float:
    """Return the part of a ramp of this length, in steps, that has passed: 0 to 1."""
    return min(1.0, done / length) if length else 1.0


def ahead_of(excess: Tensor, before: Tensor | None) -> Tensor:
    """Extrapolate the excess by ``_AHEAD`` steps from its change since the last step.

    Args:
        excess: of this step.
        before: of the last one; None at the first.
    """
    return excess if before is None else excess + _AHEAD * (excess - before.to(excess))


def ascended(multipliers: Tensor, excess: Tensor, rate: float, unit: Tensor) -> Tensor:
    """Return the multipliers after one step of ascent; 0 where the excess is not positive.

    A multiplier of one ``unit`` pulls at the gates as hard as the loss does. Larger ones grow
    exponentially, since some gates resist more than others. The excess is clamped, since gates need
    time however far off the budget is.
    """
    grown = multipliers + rate * excess.clamp(max=_FAR) * (unit + multipliers)
    return torch.where(excess > 0, grown.clamp(max=_LARGEST), 0.0)
