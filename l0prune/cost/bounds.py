"""Limits on one network: what each is about there, and how much that may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import floor

import torch
from torch import Tensor

from l0prune.cost.limits import Limit
from l0prune.cost.measures import Measure, Source, measure_of
from l0prune.errors import UsageError
from l0prune.plan.plan import Plan

_ROUNDING = 1e-9  # of a share of slots: 0.29 of 100 is 28.999…96


class Bound:
    """A limit on a network whose measure is known.

    Attributes:
        limit: as the user gave it.
        measure: what it is about.
        through: numbers of the axes that are meant; None for the whole network.
        dense: the amount with all gates open.
        most: the largest amount that is allowed.
        share: the same as a share of the dense amount, at most 1.

    Raises:
        UsageError: no axis has such a name, or the network has nothing of it.
    """

    def __init__(self, limit: Limit, measure: Measure) -> None:
        self.limit, self.measure = limit, measure
        self.through = limit.axes(measure.plan)
        self.dense = measure.dense(self.through)
        if not self.dense > 0:
            raise UsageError(
                f"the budget {limit} limits nothing: the gates have no {measure.label} to remove "
                "there"
            )
        self.most = limit.most(self.dense)
        self.share = min(1.0, limit.share(self.dense))
        if measure.each_axis:
            self.most = float(max(1, floor(self.most + _ROUNDING)))
            self.share = min(1.0, self.most / self.dense)

    def actual(self, open_: Tensor) -> float:
        """The amount in an export with these open gates, bool and flat."""
        return self.measure.actual(open_, self.through)

    def actual_share(self, open_: Tensor) -> float:
        """The share that is left in an export with these open gates, bool and flat."""
        return self.actual(open_) / self.dense

    def expected_share(self, p: Tensor) -> Tensor:
        """The expected share that is left; a scalar of p's dtype, differentiable in ``p``."""
        return self.measure.expected(p, p.dtype, self.through) / self.dense

    def gates(self) -> Tensor:
        """Gates that take something away of it; bool, flat."""
        axes, plan = self.measure.axes, self.measure.plan
        wanted = axes if self.through is None else axes & self.through
        result = torch.zeros(plan.size, dtype=torch.bool)
        for number in wanted:
            result[plan.axes[number].slice] = True
        return result


def bounds(
    plan: Plan, wanted: Sequence[Limit], sources: Sequence[Source] = ()
) -> tuple[Bound, ...]:
    """These limits on a network with this plan.

    Raises:
        UsageError: one of them makes no sense there, or its measure takes a source that is not
            among ``sources``.
    """
    names = dict.fromkeys(limit.measure for limit in wanted)
    measures = {name: measure_of(plan, name, sources) for name in names}
    found: dict[tuple[str, frozenset[int] | None], Bound] = {}
    for limit in wanted:
        measure = measures[limit.measure]
        for each in _by_axis(limit, measure) if measure.each_axis else (limit,):
            bound = Bound(each, measure)
            key = limit.measure, bound.through
            if key not in found or not measure.each_axis or bound.most < found[key].most:
                found[key] = bound
    return tuple(found.values())


def _by_axis(limit: Limit, measure: Measure) -> Iterator[Limit]:
    """The limit on each of the axes that it is about."""
    names, meant = measure.plan.names, limit.axes(measure.plan)
    numbers = sorted(measure.axes if meant is None else measure.axes & meant)
    if not numbers:
        raise UsageError(
            f"the budget {limit} limits nothing: no axis that is gated there has {measure.label}"
        )
    yield from (replace(limit, glob=names[number]) for number in numbers)
