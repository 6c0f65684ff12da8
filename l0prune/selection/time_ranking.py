"""Scores of slots, scaled by the time that the slots of their axis take on a target.

A budget in MACs says nothing of time: at equal MACs, maps of high resolution and depthwise layers
take more of it than wide layers that are read once. Where a choice by scaled scores keeps nearly
the same sum of scores, its network is taken, since it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from l0prune.plan.cost import CostModel
from l0prune.plan.limits import Bound
from l0prune.plan.plan import Plan
from l0prune.plan.width_times import WidthTimes

_POWERS = (0.05, 0.1, 0.25, 0.5, 1.0)  # of the ratio of time to budget, by which scores are divided
_LOST = 0.03  # share of the sum of scores that may be lost for time
_LEAST = 1e-3  # ratio below which an axis counts as one that takes no time
_UNIT = "estimated ms"

Choose = Callable[[Tensor], Tensor]
"""Function from scores to the open gates of the choice by them; both flat."""


def ranked_by_time(
    plan: Plan, times: WidthTimes, wanted: Sequence[Bound], scores: Tensor, choose: Choose
) -> Tensor:
    """Return the scores, or scaled ones by which the network is estimated to be faster.

    The scale of an axis is its share of the estimated time over its share of what the first budget
    limits, to a power. Of the powers that lose at most 3 % of the scores that are kept, the one of
    least time is taken.

    Shape: scores and result ``(plan.size,)``.
    """
    if not times.macs:  # no rates are known
        return scores
    model = CostModel(plan, times.costs(plan, _UNIT))
    dense = model.dense_amount(_UNIT)
    whole = next((b for b in wanted if b.through is None and not b.measure.each_axis), None)
    if whole is None or not dense or bool((scores < 0).any()):
        return scores
    ratios = torch.ones(plan.size, dtype=torch.float64)
    for number, axis in enumerate(plan.axes):
        only = frozenset({number})
        share = whole.measure.dense(only) / whole.dense
        if share:
            ratios[axis.slice] = model.dense_amount(_UNIT, only) / dense / share
    ratios = ratios.clamp(min=_LEAST)

    def judged(worth: Tensor) -> tuple[float, float]:
        open_ = choose(worth)
        kept = plan.kept(open_).to(torch.float64)
        return model.amount(kept, _UNIT), float(scores.double()[open_].sum())

    best, (least, most) = scores, judged(scores)
    for power in _POWERS:
        scaled = scores.double() / ratios**power
        time, kept = judged(scaled)
        if time < least and kept >= (1 - _LOST) * most:
            best, least = scaled, time
    return best
