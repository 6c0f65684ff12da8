"""Initial state of gates from one-shot scores, and the steps in which branches are frozen.

By default slots start from a first-order score, and branches, of which that says little, from how
the outputs change without them. A run spends a fixed share of its steps on these scores.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import DataError, Mismatch, UsageError, warn
from l0prune.gating.attaching import gates_of, holder
from l0prune.gating.bank import CLOSED, Gates
from l0prune.plan.switches import switches_of
from l0prune.progress.stages import stage
from l0prune.running.batches import Feed
from l0prune.running.criteria import Loss
from l0prune.running.processes import World, is_sharded, process_group
from l0prune.running.task import Task
from l0prune.selection.oneshot import OneShot, most_trials
from l0prune.selection.score_input import ScoreInput
from l0prune.selection.scores import (
    FORWARDS,
    ComputedScore,
    compute_best_scores,
    compute_score,
    joined_scores,
    over_axis_mean,
)
from l0prune.training.budget import Budget
from l0prune.training.settings import ALIKE, AUTO, STARTS, Settings
from l0prune.training.wrappers import agree_on_start

# Shares of the steps in which gates learn: scoring on a batch costs about as much as a step.
_SCORES, _TRIES = 0.05, 0.025
_FORWARD = 1 / 3  # of a step
_OF_SLOTS = range(10, 101)  # batches
_EXAMPLES = range(8, 33)  # of a batch for branches: few are enough to rank them
_OF_WAYS = range(1, 9)  # batches


@dataclass(frozen=True, slots=True)
class ScoringBudget:
    """Numbers of batches and examples that the scores of one run may use.

    Attributes:
        slots: batches on which slots are scored.
        branches: batches on which branches are tried.
        few: examples of each batch for branches.
        ways: batches on which candidates for the one-shot cut are compared.
    """

    slots: int
    branches: int
    few: int
    ways: int

    @classmethod
    def of(cls, learning: int, size: int, branches: int) -> ScoringBudget:
        """Return the scoring budget of a run with ``learning`` steps, in batches of ``size``."""
        slots = _within(_OF_SLOTS, _SCORES * learning)
        if not branches:
            return cls(slots, 0, 0, 0)
        bear = _TRIES * learning
        examples = bear * size / (FORWARDS * _FORWARD * branches)
        few = min(size, _within(_EXAMPLES, examples))
        ways = _within(_OF_WAYS, bear / (most_trials(branches) * _FORWARD))
        return cls(slots, max(1, round(examples / few)), few, ways)

    def steps(self, size: int, branches: int) -> float:
        """Return the cost of all scoring, in steps of training with batches of ``size``."""
        trying = self.branches * self.few / size * branches * FORWARDS
        return self.slots + (trying + most_trials(branches) * self.ways) * _FORWARD


def _within(limits: range, number: float) -> int:
    """Return the number in ``limits`` that is nearest."""
    return min(max(round(number), limits[0]), limits[-1])


@dataclass(frozen=True, slots=True)
class Beginning:
    """Outcome of gate initialisation: a message, or none, and whether branches are frozen now."""

    said: str = ""
    decided: bool = False


def init_gates(
    model: nn.Module,
    settings: Settings,
    learning: int,
    budget: Budget | None,
    feed: Feed,
    device: str | torch.device,
    world: World,
) -> Beginning:
    """Initialise the gates of a model from the score in the settings, in place.

    One process computes the score for all. If none was named and none can be computed on this data,
    the gates start alike, and a warning says why.
    """
    how = _wanted(model, settings.start, learning, budget)
    if how == ALIKE:
        return Beginning()
    gates, size = gates_of(model), feed.length
    scoring = ScoringBudget.of(learning, size, int(switches_of(gates.plan).sum()))
    subject = ScoreInput(*holder(model), feed.task, None, feed.batch_size, device, settings.seed)
    # Without a loss scaler gradients are too small for fp16.
    autocast = settings.autocast if settings.autocast == "bf16" else None
    slots = replace(subject, batches=min(feed.steps, scoring.slots), autocast=autocast)
    few = min(feed.batch_size, scoring.few)
    most = math.ceil(feed.steps * size / max(1, few))
    branches = replace(subject, batches=min(most, scoring.branches), batch_size=few)
    ways = replace(subject, batches=max(1, scoring.ways))

    def lean() -> Beginning:
        try:
            found = (
                compute_best_scores(slots, branches) if how == AUTO else [compute_score(how, slots)]
            )
        except (UsageError, DataError) as error:
            if how != AUTO or isinstance(error, Mismatch):
                raise
            warn(f"the gates start alike, without scores: {error}")
            return Beginning()
        scores = over_axis_mean(gates.plan, joined_scores(gates.plan, found))
        gates.init_from_scores(scores)
        said = f"start: gates as their scores say: {', '.join(map(_said, found))}"
        if budget is None or not settings.oneshot_fraction or gates.plan.slots < gates.plan.size:
            return Beginning(said)
        cut = _cut(ways, budget, settings.oneshot_fraction, scores)
        return replace(cut, said=f"{said}; {cut.said}")

    with stage("scoring what the gates start from"):
        found = world.from_first(world.first_alone(lean))
    agree_on_start(model, world)
    return found or Beginning()


def init_gates_from(
    model: nn.Module,
    data: Any,
    learning: int,
    budget: Budget | None,
    *,
    loss: Loss | str | None,
    batch_size: int,
    device: str | torch.device,
    seed: int,
    **wanted: Any,
) -> Beginning:
    """Initialise gates in a user's loop; see ``Pruner.start_from``."""
    if any(map(is_sharded, model.parameters())):
        raise UsageError("the weights are in shards (FSDP): call start_from before that")
    root, _ = holder(model)
    settings = Settings.of({**wanted, "batch_size": batch_size, "seed": seed})
    feed = Feed(Task.of(data, loss), batch_size, seed, augment=False)
    if (known := feed.task.preprocessing) is not None:
        gates_of(root).facts["preprocessing"] = known.model_dump()
    with process_group() as world:
        return init_gates(root, settings, learning, budget, feed, device, world)


def _said(found: ComputedScore) -> str:
    return f"{found.name} of {found.input.batches} batch{'es' * (found.input.batches != 1)}"


def _cut(subject: ScoreInput, budget: Budget, part: float, scores: Tensor) -> Beginning:
    """Close the slots of the one-shot cut, in place.

    If the loss decided how many branches are removed, the remaining ones are frozen.
    """
    try:
        open_, decided = OneShot(budget.bounds, budget.blocks, scores, part).choose(subject)
    except UsageError as error:
        return Beginning(f"nothing is cut at once: {error}")
    subject.gates.set_open(open_)
    left = budget.shares(open_).items()
    shares = (f"{share:.0%} stay where {text} is asked" for text, share in left)
    gone = int((switches_of(subject.plan) & ~open_).sum())
    without = f", without {gone} branch{'es' * (gone > 1)}" if gone else ""
    said = f"cut at once, a part of the way to the budget: {', '.join(shares)}{without}"
    return Beginning(said, decided)


@torch.no_grad()
def stand(gates: Gates) -> None:
    """Set all open gates to the same log α, at which z is 1."""
    starts = gates.initial(1 - CLOSED).to(gates.log_alpha)
    gates.log_alpha.copy_(torch.where(gates.open(), starts, gates.log_alpha))


def _wanted(model: nn.Module, start: str, learning: int, budget: Budget | None) -> str:
    """Return the name of the score, or ``ALIKE``.

    Raises:
        UsageError: a score was named, and the gates do not learn.
    """
    gates = gates_of(model)
    if not learning or not gates.log_alpha.requires_grad:
        if start in STARTS:
            return ALIKE
        raise UsageError(
            f"start={start!r} moves gates before they learn, and in this run they do not learn "
            "(learn=False, no step for them, or frozen gates): leave start out, or let them learn"
        )
    if start != AUTO:
        return start
    learns_bits = gates.plan.slots < gates.plan.size  # no score ranks bits
    starts = budget is not None and gates.are_uniform() and not learns_bits
    return AUTO if starts else ALIKE


_FREEZE = 0.7  # of the steps in which gates learn, under a budget
_WAIT = 0.5  # of the steps in which gates learn, under a price


class Decision:
    """Decision of which branches stay, and when.

    Under a budget all are decided at one step. Widths are many, so that they meet the expected
    amount on average. A branch with open probability ½ is expected at half its cost, but is there
    whole or not at all: so it is decided while widths can still compensate. The number of likeliest
    branches to stay changes the expectation least, since closed widths would not reopen for others.

    After a one-shot cut by a score the loss has decided how many branches go, and they are frozen
    from the first step on. A gate learns the worth of one slowly, in many steps with and without.

    Under a price branches wait for the widths. A branch is worth what its best width is worth: at
    first the price is that of its full width, which none is worth, and all would be removed.
    """

    def __init__(
        self, gates: Gates, learning: int, freeze_fraction: float | None, budget: Budget | None
    ) -> None:
        self._gates, self._budget = gates, budget
        self._switches = switches_of(gates.plan).nonzero().flatten()
        self._waiting = self._held = range(0)
        self._kept: Tensor | None = None
        if len(self._switches):
            first = round((_FREEZE if freeze_fraction is None else freeze_fraction) * learning)
            self._held = range(first if budget else learning, learning + 1)
            if not budget and len(self._switches) < gates.plan.size:
                self._waiting = range(round(_WAIT * learning))

    @property
    def first(self) -> int:
        """The step from which on branches are held."""
        return self._held.start

    @first.setter
    def first(self, step: int) -> None:
        self._held = range(step, self._held.stop)

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Store the log α of waiting branches, before each step of an optimizer."""
        waits = step in self._waiting
        self._kept = self._gates.log_alpha[self._where()].clone() if waits else None

    @torch.no_grad()
    def hold(self, step: int) -> None:
        """Hold the gates of waiting or decided branches, after each step and before the first.

        Before the first they keep their state. Waiting gates are restored instead of having no
        gradient: an optimizer that divides by the size of past gradients would move them in leaps
        after many of zero.
        """
        if self._kept is not None:
            self._gates.log_alpha[self._where()] = self._kept
        if step not in self._held:
            return
        log_alpha, where = self._gates.log_alpha, self._where()
        p = self._gates.open_probability()
        stays = p[where] >= 0.5 if step else self._gates.open()[where]
        if self._budget and step and step == self._held.start:
            stays = likeliest(p, where, self._budget)
        open_, closed = (self._gates.initial(p)[where] for p in (1 - CLOSED, CLOSED))
        log_alpha[where] = torch.where(stays, open_, closed).to(log_alpha.dtype)

    def _where(self) -> Tensor:
        """Return the switches, on the device of the gates."""
        self._switches = self._switches.to(self._gates.log_alpha.device)
        return self._switches


def likeliest(p: Tensor, switches: Tensor, budget: Budget) -> Tensor:
    """Choose the number of likeliest switches that changes the budgets' expectation least.

    Shape: p flat; switches are numbers of gates, and the result is bool, of their shape.
    """
    order = p[switches].argsort(descending=True, stable=True)
    before = budget.share_of_targets(p)

    def stay(count: int) -> Tensor:
        return torch.zeros_like(order, dtype=torch.bool).index_fill(0, order[:count], True)

    def change(count: int) -> float:
        decided = p.index_copy(0, switches, stay(count).to(p))
        return float((budget.share_of_targets(decided) / before).max())

    count = bisect_right(range(len(order) + 1), 1.0, key=change)
    around = range(max(count - 1, 0), min(count, len(order)) + 1)
    return stay(min(around, key=lambda n: abs(change(n) - 1)))
