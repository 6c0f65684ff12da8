"""Budgets as constraints: a multiplier for each, which rises while its budget is exceeded.

With ``g(φ) = E[count]/target − 1``, by how much of its target a network with gates φ is too large,
the loss is

    L(θ, φ) + Σ λᵢ·gᵢ(φ),    λᵢ ≥ 0,

which weights and gates descend and multipliers ascend (Gallego-Posada et al. 2022). A multiplier
starts again at 0 once its budget is met, so that nothing pushes a network that is small enough.

Gates have momentum: what pushes them until the budget is met pushes them far beyond, and those that
are closed by then hardly come back. So a multiplier goes by what the excess will be some steps from
now if it changes as it did since the last one: the derivative of a PID controller (Stooke et al.
2020 have all three of its parts).

An excess is a share, a loss has units of its own, and either may be a thousand times the steeper
for the gates. ``Balance`` weighs budgets by the two gradients, now and then.

Where widths come in multiples of eight, a layer that gates have left three maps gets eight in the
end, and others pay for it, late and by no loss. So slots that are cut together have one log α
between them, and one block of each axis counts as if it were sure to stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.attaching import gates_of
from l0prune.plan.limits import LimitsLike, bounds, limits, warn_of_little
from l0prune.plan.measures import Source
from l0prune.plan.numbers import check_number, check_whole
from l0prune.plan.plan import Axis, Plan
from l0prune.plan.switches import switches_of
from l0prune.selection.fit import blocks_for, meet, unmet
from l0prune.selection.fitting import Movable, Widths

_EVERY = 10  # steps
_KEPT = 0.9  # of what was found before
_ROUNDING = 1e-4  # of the budgets' gradient, below which nothing is known of the loss
# The rate of ascent, times the steps that there are.
RATE = 500.0
# A share of the target beyond which excess counts no more.
_FAR = 0.1
_LARGEST = 1e6
# Steps that gates go on as they did: Adam's first moment (β₁ = 0.9) is a mean over about so many.
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
        multipliers: λ of each, in units of the loss per share of the target.
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
        round_to: open slots of an axis come in multiples of this; see ``fit``.
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
        latency: Source | None = None,
    ) -> None:
        check_whole("steps", steps)
        check_number("ramp", ramp, most=1)
        self._model, self._gates = model, gates_of(model)
        self.limits = limits(wanted)
        self._steps, self._ramp = steps, ramp
        self._rate = RATE / steps if rate is None else rate
        plan = self._gates.plan
        self.bounds = bounds(plan, self.limits, () if latency is None else (latency,))
        self.blocks = blocks_for(plan, self.bounds, round_to, latency)
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
        """Σ λᵢ·gᵢ at open probabilities ``p``, shape ``(gates,)``; a scalar of p's dtype."""
        if self.multipliers.device != p.device:  # no transfer, and so no wait, in later steps
            self.multipliers = self.multipliers.to(p.device)
            self._shares, self._begins = self._shares.to(p.device), self._begins.to(p.device)
            if self._block_coupling is not None:
                self._block_coupling.move(p.device)
        excess = self.share_of_targets(p) - 1
        self._excess = excess.detach()
        self._balance.look(self.done, self._gates.log_alpha, excess)
        return torch.dot(self.multipliers.to(p.dtype), excess)

    def share_of_targets(self, p: Tensor) -> Tensor:
        """Return each budget's expected amount at open probabilities ``p``, over its target now.

        Shape: p ``(gates,)``; result ``(k,)``, of p's dtype.
        """
        counted = p if self._block_coupling is None else self._block_coupling.least(p)
        shares = torch.stack([bound.expected_share(counted) for bound in self.bounds])
        return shares / self.targets.to(p)

    @property
    def targets(self) -> Tensor:
        """The share of the dense amount that each budget allows at this step; shape ``(k,)``.

        Each step takes the same part of what is left: cutting 40 % of a small network is as hard
        as 40 % of a large one, and needs as long. It begins at what an export had of it when the
        budget was made, where that is more.
        """
        passed = passed_of(self.done, self._ramp * self._steps)
        return self._begins ** (1 - passed) * self._shares**passed

    def observe(self, open_: Tensor) -> None:
        """Take what an export with these open gates has, bool and flat, for what is expected.

        For runs whose gates have no gradient, before ``step``.
        """
        self._excess = self._shares_now(open_).to(self.targets) / self.targets - 1

    def meets(self, open_: Tensor, *, in_the_end: bool = False) -> bool:
        """Return whether an export with these open gates, bool and flat, is within the targets.

        Of this step; or, ``in_the_end``, the budgets themselves.
        """
        targets = self._shares if in_the_end else self.targets
        return bool((self._shares_now(open_).to(targets) <= targets).all())

    def _shares_now(self, open_: Tensor) -> Tensor:
        return torch.tensor([*self.shares(open_.cpu()).values()])

    @property
    def weight(self) -> float:
        """Gradient of the gates at a multiplier of 1, relative to that of the loss."""
        return float(self._balance.weight)

    def shares(self, open_: Tensor) -> dict[str, float]:
        """Return an export's share of the dense amounts, by the limit's text."""
        return {str(bound.limit): bound.actual_share(open_) for bound in self.bounds}

    @torch.no_grad()
    def step(self, scale: float | Tensor = 1.0) -> None:
        """Ascend: to be called between ``loss.backward()`` and the optimizer's step.

        The gradient of the gates keeps its direction and gets the size that the loss alone gives
        it. An adaptive optimizer remembers what it was before: it would else stand still while
        multipliers are large, or once they are back at 0.

        Slots that are cut in whole blocks get one log α between them, if their gates do not all
        start alike, and the mean gradient of their block.

        Args:
            scale: by which gradients are multiplied, where a loss scaler is not yet undone.

        Raises:
            UsageError: this step's loss had no part of this budget.
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

        Branches stand as they were decided, unless no choice of slots meets the budget so.

        Args:
            fill: open more where there is room; else a network that is smaller may stay so.

        Returns:
            The amounts of the exported model, for each limit by its text.
        """
        plan, worth = self._gates.plan, self._gates.log_alpha.detach()
        slots = Movable.of(~switches_of(plan), self._gates.open().cpu())
        movable = slots if unmet(plan, self.bounds, self.blocks, slots) is None else None
        return meet(self._model, self.bounds, worth, self.blocks, fill=fill, movable=movable)

    def report(self, open_: Tensor) -> dict[str, dict[str, float]]:
        """For each limit: its share of the dense count, the target now, the real share of an
        export with these open gates, and the multiplier."""
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
        """The multipliers, the steps done, the last excess, what budgets weigh, and which slots are
        together."""
        return {
            "multipliers": self.multipliers.cpu(),
            "done": self.done,
            "weight": self._balance.weight.cpu(),
            "begins": self._begins.cpu(),
            "excess": None if self._before is None else self._before.cpu(),
            "blocks": None if self._block_coupling is None else self._block_coupling.numbers.cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self.multipliers = state["multipliers"].to(self.multipliers.device)
        self.done = state["done"]
        self._before = state["excess"]
        self._begins = state["begins"].to(self._shares)
        self._balance.weight = state["weight"]
        if (numbers := state["blocks"]) is not None:
            self._block_coupling = BlockCoupling(
                self._gates.plan, self.blocks, -numbers.to(self.multipliers.device)
            )


class Balance:
    """The norm of the gradient of all excess over that of the loss, for log α.

    The ``weight`` is the geometric mean over the looks, late ones counting most.
    """

    def __init__(self) -> None:
        self.weight = torch.tensor(1.0)
        self._pulls: Tensor | None = None

    def look(self, done: int, log_alpha: Tensor, excess: Tensor) -> None:
        """Every few steps, ``done`` so far: note the gradients of the budgets' excess, ``(k,)``."""
        if done % _EVERY == 0 and excess.requires_grad:
            pulls = (
                torch.autograd.grad(each, log_alpha, retain_graph=True)[0]
                for each in excess.unbind()
            )
            self._pulls = torch.stack([*pulls])

    def weigh(self, done: int, gradient: Tensor, multipliers: Tensor) -> None:
        """After ``look``: the weight, by the gradient for log α of loss and budgets together.

        Nothing waits for the device. Where one of the two is next to nothing, the weight stays.
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
    """The blocks of all axes. A block is made of slots that matter about as much.

    Those of one rank in axes that keep equally many slots are one block.

    Attributes:
        numbers: of the block that each slot is in, shape ``(plan.size,)``.

    Args:
        worth: by which slots are put beside each other; shape ``(plan.size,)``. The blocks are kept
            where it is.
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
        """Keep the blocks there, so that no step has to bring them."""
        self.numbers, self._axes = self.numbers.to(device), self._axes.to(device)
        self._stays, self._sizes = self._stays.to(device), self._sizes.to(device)

    def mean(self, values: Tensor) -> Tensor:
        """For each slot the mean of its block; shape ``(plan.size,)``."""
        sums = torch.zeros_like(values).index_add(0, self.numbers, values)
        return sums[self.numbers] / self._sizes

    def least(self, p: Tensor) -> Tensor:
        """Return ``p`` with 1 for the block of each axis that is likeliest to stay open.

        Axes that may close completely, and those without blocks, are as they were.
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
    """Return the excess ``_AHEAD`` steps from now, if it goes on as since the last step.

    Args:
        excess: of this step.
        before: of the last one; None at the first.
    """
    return excess if before is None else excess + _AHEAD * (excess - before.to(excess))


def ascended(multipliers: Tensor, excess: Tensor, rate: float, unit: Tensor) -> Tensor:
    """One step of ascent; 0 where the budget is met, or will be.

    A multiplier of one ``unit`` pulls at the gates as hard as the loss does. It grows in proportion
    to itself once it is larger, since some gates resist more than others; and no faster however far
    off the budget is, since gates need time.
    """
    grown = multipliers + rate * excess.clamp(max=_FAR) * (unit + multipliers)
    return torch.where(excess > 0, grown.clamp(max=_LARGEST), 0.0)
