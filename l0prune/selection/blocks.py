"""Blocks: slots of an axis that open and close together, for widths in whole multiples."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from typing import Literal

from l0prune.cost.measures import Measure
from l0prune.errors import UsageError
from l0prune.plan.branch import KIND
from l0prune.plan.layout import Both, axes_of
from l0prune.plan.plan import Plan

Widths = int | Literal["auto"]
"""Widths are multiples of this; ``"auto"``: of what the measures in use are best cut by."""


def blocks_of(plan: Plan, round_to: Widths, measures: Iterable[Measure]) -> list[int]:
    """For each axis, the number of slots that open and close together.

    A number is for all axes but heads, groups, and single inputs of a layer that are cut beside
    whole maps. With ``"auto"`` each axis has what all the measures like.

    Raises:
        UsageError: ``round_to`` is neither.
    """
    if round_to == "auto":
        wanted = [found for measure in measures if (found := measure.blocks()) is not None]
        return [lcm(*each) for each in zip(*wanted, strict=True)] or [1] * len(plan.axes)
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise UsageError(
            f"round_to must be a whole number of at least 1, or 'auto', not {round_to!r}"
        )
    return [round_to if has_widths else 1 for has_widths in have_widths(plan)]


def have_widths(plan: Plan) -> list[bool]:
    """For each axis, whether the number of its slots is a width of some tensor.

    That of heads and groups is none, nor that of branches, nor that of single inputs that are cut
    beside whole maps.
    """
    fine = beside_maps(plan)
    return [
        axis.kind not in ("head", "group", KIND) and number not in fine
        for number, axis in enumerate(plan.axes)
    ]


def beside_maps(plan: Plan) -> set[int]:
    """The axes, by number, of single inputs of a layer that are cut beside whole maps."""
    return {
        axis
        for site in plan.sites
        if isinstance(site.layout, Both)
        for axis in axes_of(site.layout.fine)
    }
