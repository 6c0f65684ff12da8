"""Correction of choices by observed amounts, such as measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError, warn
from l0prune.plan.limits import Bound
from l0prune.progress.stages import steps
from l0prune.running.processes import run_on_first
from l0prune.selection.fitted import Observation
from l0prune.selection.fitting import Fitting, SlotChoice

# How many choices are observed, at most.
_ROUNDS = 8
# A choice whose observed amount is this share of a limit is full enough.
_CLOSE = 0.97
# Observations of a choice that seems to meet its bounds, of which the median counts. Times are
# noisy: of several choices observed once each, one would be taken that looked better than it is.
_LOOKS = 3
# If more is observed than is allowed, the next choice's prediction is smaller by at least this.
_STEP = 0.005


@dataclass(frozen=True)
class ObservedChoice:
    """A choice of slots, and the observed amounts of its export.

    Attributes:
        slots: the choice of slots.
        seen: the real amounts, of those bounds whose measures can be observed.
    """

    slots: SlotChoice
    seen: Mapping[Bound, float]

    @property
    def open_(self) -> Tensor:
        """The open gates; bool, flat."""
        return self.slots.open_

    @property
    def fullest(self) -> float:
        """The largest observed amount as a share of its bound; above 1 if that is not met."""
        return max((found / bound.most for bound, found in self.seen.items()), default=1.0)

    @property
    def predicted(self) -> float:
        """The largest predicted amount as a share of its bound."""
        return max(bound.actual(self.open_) / bound.most for bound in self.seen)

    def is_better(self, other: ObservedChoice) -> bool:
        """Return whether this choice meets its bounds and keeps more, or exceeds them by less.

        The larger prediction keeps more. Observations do not tell: of two choices that meet a
        bound, the one that keeps more may well be the faster one.
        """
        if (self.fullest <= 1) != (other.fullest <= 1):
            return self.fullest <= 1
        if self.fullest > 1:
            return self.fullest < other.fullest
        return self.predicted > other.predicted


class _Between:
    """Interval of one bound's predicted amount, from observed choices."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._met, self._exceeded = 0.0, math.inf  # as predicted: the most, and the least
        self._refused = 0.0  # the most for which there was no choice

    def next(self, last: ObservedChoice, allowed: float) -> float:
        """Return the amount to allow the next choice, after one that was allowed ``allowed``."""
        predicted, found = self._bound.actual(last.open_), last.seen[self._bound]
        if found > self._bound.most:
            self._exceeded = predicted
            # Times are noisy: a larger amount that was met before may not be met again.
            self._met = self._met if self._met < predicted else 0.0
            wanted = min(allowed * predicted / found, (1 - _STEP) * predicted)
        else:
            self._met = max(self._met, predicted)
            wanted = allowed * predicted / found
        low = max(self._met, self._refused)
        is_between = low < wanted < self._exceeded
        if is_between or not low or self._exceeded == math.inf:
            return wanted
        return (low + self._exceeded) / 2

    def refuse(self, allowed: float) -> None:
        """Record that no choice is as small as ``allowed``."""
        self._refused = max(self._refused, allowed)


def observed(model: nn.Module, wanted: Sequence[Bound]) -> dict[Bound, float]:
    """Return the real amounts of an export of this gated model, where they can be observed.

    A bound on some axes is about a part of the network that cannot be observed alone.
    """
    found = (
        (bound, run_on_first(lambda of=bound.measure: of.observed(model)))  # type: ignore[misc]
        for bound in wanted
        if bound.through is None
    )
    return {bound: amount for bound, amount in found if amount is not None}


def corrected(
    fitting: Fitting,
    start: Tensor,
    observe: Callable[[Tensor], Mapping[Bound, float]],
    *,
    fill: bool,
) -> tuple[ObservedChoice, list[ObservedChoice]]:
    """Return the best of a few choices, and all of them, each corrected by the one before.

    The amount that a bound allows is scaled by predicted over observed, between amounts that were
    met and not met. A warning is given if no choice meets its bounds.

    Raises:
        UsageError: no choice was found that is predicted to meet all bounds.
    """
    tried: list[ObservedChoice] = []
    between: dict[Bound, _Between] = {}
    for _ in steps(range(_ROUNDS)):
        if tried:
            last = tried[-1]
            if last.fullest <= 1 and (not fill or last.fullest >= _CLOSE):
                break
            for bound, each in between.items():
                fitting.most[bound] = each.next(last, bound.most)
        try:
            slots = fitting.choose(start, fill=fill)
        except UsageError:  # no choice is as small as that
            if not tried:
                raise
            for bound, each in between.items():
                each.refuse(fitting.most[bound])
            continue
        if tried and torch.equal(slots.open_, tried[-1].open_):
            break
        tried.append(_observed_choice(slots, observe))
        between = between or {bound: _Between(bound) for bound in tried[0].seen}
    best = tried[0]
    for choice in tried[1:]:
        best = choice if choice.is_better(best) else best
    for bound, found in best.seen.items():
        if found > bound.most:
            warn(_excess(bound, found))
    return best, tried


def _observed_choice(
    slots: SlotChoice, observe: Callable[[Tensor], Mapping[Bound, float]]
) -> ObservedChoice:
    choice = ObservedChoice(slots, observe(slots.open_))
    if not choice.seen or choice.fullest > 1:
        return choice
    seen = [choice.seen, *(observe(slots.open_) for _ in steps(range(_LOOKS - 1)))]
    return ObservedChoice(
        slots, {bound: median(each[bound] for each in seen) for bound in choice.seen}
    )


def observations(tried: Sequence[ObservedChoice], best: ObservedChoice) -> tuple[Observation, ...]:
    """Return the observations of each choice, in their order, for each observed bound."""
    return tuple(
        Observation(
            budget=str(bound.limit),
            dense=bound.dense,
            allowed=bound.most,
            predicted=bound.actual(choice.open_),
            observed=found,
            chosen=choice is best,
        )
        for choice in tried
        for bound, found in choice.seen.items()
    )


def _excess(bound: Bound, found: float) -> str:
    measure = bound.measure
    return (
        f"the budget {bound.limit} is not met: {measure.show(found)} of {measure.label} "
        f"were observed of the smallest choice of widths that was tried, and "
        f"{measure.show(bound.most)} are allowed. What was predicted of it does not hold here: is "
        "the machine busy with something else, or are its tables of another one? Else give a "
        "larger budget"
    )
