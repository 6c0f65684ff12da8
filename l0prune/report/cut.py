"""Every layer of a network before and after a cut, in the order in which the forward meets them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from l0prune.capture.weights import Weight
from l0prune.plan.layout import Layout, leaves, size_of
from l0prune.plan.needs import is_needed
from l0prune.plan.plan import Cost, Plan
from l0prune.plan.switches import gone
from l0prune.report.content import Axis, Layer, Pair, Side
from l0prune.report.layers import Layer as Found
from l0prune.report.layers import Side as FoundSide
from l0prune.report.layers import Sides, costs_of, layers_of

UNGATED = "no gate was put on it"


def axes_of(plan: Plan, kept: Tensor) -> list[Axis]:
    """The axes that had gates; of heads, which of them stayed.

    Args:
        plan: of the network before the cut.
        kept: the slots that stay; bool, flat, shape ``(plan.size,)``.
    """
    found = []
    for axis in plan.axes:
        left = kept[axis.slice].nonzero().flatten().tolist()
        slots = left if axis.kind == "head" else None
        found.append(
            Axis(name=axis.name, kind=axis.kind, before=axis.size, after=len(left), kept=slots)
        )
    return found


def layers_before_and_after(
    plan: Plan, kept: Tensor, weights: Sequence[Weight], otherwise: str = UNGATED
) -> list[Layer]:
    """Widths, params and MACs of each layer before the cut and after it.

    Args:
        plan: of the network before the cut.
        kept: as for ``axes_of``.
        weights: its layers.
        otherwise: why a side stays whole of which the plan says nothing.
    """
    counted = {cost.tensor for cost in plan.costs if cost.unit == "params"}
    of_all = {plan.aliases.get(name, name) for weight in weights for name in weight.tensors}
    found = layers_of(plan, weights, of_all - counted, otherwise)
    costs = costs_of(plan, weights)
    numbers = {axis.name: number for number, axis in enumerate(plan.axes)}
    pairs = zip(weights, found, strict=True)
    layers = {w.name: _layer(plan, kept, w, of, costs[w.name], numbers) for w, of in pairs}
    return [layers[name] for name in _in_order(plan, costs)]


def _in_order(plan: Plan, costs: dict[str, list[Cost]]) -> list[str]:
    """The layers' names by where the forward first works with them; last, those it never does."""
    places = {id(cost): place for place, cost in enumerate(plan.costs)}
    first = {
        name: min((places[id(each)] for each in of), default=len(places))
        for name, of in costs.items()
    }
    return sorted(costs, key=first.__getitem__)


def _layer(
    plan: Plan,
    kept: Tensor,
    weight: Weight,
    found: Found,
    costs: Sequence[Cost],
    numbers: dict[str, int],
) -> Layer:
    layouts = Sides(plan, weight).layouts() if found.used else ([], [])
    sides = [
        _side(plan, kept, side, of, numbers)
        for side, of in zip((found.input, found.output), layouts, strict=True)
    ]
    branch = _gone_with(plan, kept, costs)
    if branch:
        why = f"the branch {branch} is gone"
        sides = [side.model_copy(update={"after": 0, "reason": why}) for side in sides]
    return Layer(
        name=found.name,
        kind=found.kind,
        input=sides[0],
        output=sides[1],
        params=Pair(before=found.params, after=_amount(plan, kept, costs, "params")),
        macs=Pair(before=found.macs, after=_amount(plan, kept, costs, "macs")),
    )


def _gone_with(plan: Plan, kept: Tensor, costs: Sequence[Cost]) -> str:
    """The branch that is gone and had all of the layer to itself; empty where there is none."""
    names = gone(plan, kept)
    mine = [cost.needed for cost in costs if cost.unit == "params"]
    if not mine or any(is_needed(of, names) for of in mine):
        return ""
    return next(name for name in names if any(name in each for of in mine for each in of))


def _side(
    plan: Plan, kept: Tensor, side: FoundSide, layouts: Sequence[Layout], numbers: dict[str, int]
) -> Side:
    """A side that lies on several dims (positions × channels) is as wide as those with an axis."""
    cut = [layout for layout in layouts if any(leaves(layout))]
    before, after = side.size, side.size
    if cut:
        before, after = prod(map(size_of, cut)), _left(plan, kept, cut)
    axes = [numbers[name] for name in side.axes]
    return Side(before=before, after=after, axes=axes, reason=side.reason)


def _left(plan: Plan, kept: Tensor, layouts: Sequence[Layout]) -> int:
    return prod(int(plan.mask(layout, kept).sum()) for layout in layouts)


def _amount(plan: Plan, kept: Tensor, costs: Sequence[Cost], unit: str) -> int:
    of_unit = (cost for cost in costs if cost.unit == unit)
    return round(sum(cost.scale * _left(plan, kept, cost.dims) for cost in of_unit))
