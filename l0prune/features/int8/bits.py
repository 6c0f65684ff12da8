"""Bits of weights and activations that are learned, as axes of a plan, and what they cost.

A quantized tensor has a menu of bits b₁ < b₂ < … of which each divides the next, so that each grid
is a subset of the next. Its axis has one slot for each. The first stays; the gate z of any other
adds the residual on its finer grid to the sum (van Baalen et al. 2020, arXiv 2005.07093, eq. 6):

    x_q = x₁ + z₂·(ε₂ + z₃·(ε₃ + …)),    so that    bits = b₁ + z₂·((b₂−b₁) + z₃·((b₃−b₂) + …)).

The axis occurs in no tensor's layout. A multiply-accumulate costs the bits of its weight times
those of its input; in floating point 32 each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from torch import Tensor

from l0prune.errors import UsageError
from l0prune.features.int8.ranges import QuantizedLayer, Scheme
from l0prune.plan.cost import CostModel
from l0prune.plan.layout import Layouts, Slots
from l0prune.plan.measures import FLOAT, Bops
from l0prune.plan.numbers import is_count
from l0prune.plan.plan import BITS, Axis, Cost, Plan

MOST = 16  # largest bits of a menu: float32 holds no grid that is much finer


def check_menu(menu: Sequence[int]) -> tuple[int, ...]:
    """Return the bits of a menu such as ``(0, 2, 4, 8, 16)`` without the 0, which is for slots.

    Raises:
        UsageError: the menu is invalid.
    """
    found = tuple(menu)
    if not all(map(is_count, found)) or found[:1] != (0,) or len(found) < 2:
        raise UsageError(
            f"bits={found} is no menu: write 0, which is for slots that are pruned, and then the "
            "bits of those that stay, such as (0, 2, 4, 8, 16) or (0, 8)"
        )
    bits = found[1:]
    fits = all(low < high and high % low == 0 for low, high in pairwise(bits))
    if not (fits and bits[0] >= 2 and bits[-1] <= MOST):
        raise UsageError(
            f"bits={found} is no menu: bits go from 2 to {MOST}, and each divides the next, so "
            "that a grid lies in that of more bits; such as (0, 2, 4, 8, 16) or (0, 4, 8)"
        )
    return bits


def name_of_weight(layer: QuantizedLayer) -> str:
    """Return the name of the axis for the bits of a layer's weight."""
    return f"{layer.weight}.bits"


def names_of_points(scheme: Scheme) -> dict[int, str]:
    """Return the names of the axes for the bits of the layers' inputs, by point."""
    found: dict[int, str] = {}
    for layer in scheme.layers:
        found.setdefault(layer.reads, f"{layer.path}.input.bits".removeprefix("."))
    return found


def with_bits(plan: Plan, scheme: Scheme, menu: Sequence[int]) -> Plan:
    """Return the plan with one axis for the bits of each weight and each input of a layer.

    These axes are its last ones. Costs in ``bops`` are added.

    Args:
        plan: without such axes.
        scheme: what is quantized.
        menu: bits, without 0.
    """
    points = names_of_points(scheme)
    names = dict.fromkeys((*map(name_of_weight, scheme.layers), *points.values()))
    start, count = plan.size, len(menu)
    axes = [Axis(name, BITS, count, start + n * count, 0) for n, name in enumerate(names)]
    numbers = {name: len(plan.axes) + n for n, name in enumerate(names)}
    layers = {(layer.path, layer.weight): layer for layer in scheme.layers}
    costs = []
    for cost in plan.costs:
        if cost.unit != "macs":
            continue
        layer = layers.get((cost.owner, cost.tensor))
        if layer is None:
            costs.append(replace(cost, unit=Bops.name, scale=cost.scale * FLOAT**2))
            continue
        sides = name_of_weight(layer), points[layer.reads]
        weight, read = (list(_terms(numbers[name], menu)) for name in sides)
        for more, of_weight in weight:
            for less, of_read in read:
                dims = (*cost.dims, *of_weight, *of_read)
                costs.append(
                    replace(cost, unit=Bops.name, scale=cost.scale * more * less, dims=dims)
                )
    return replace(plan, axes=(*plan.axes, *axes), costs=(*plan.costs, *costs))


def without_bits(plan: Plan) -> Plan:
    """Undo ``with_bits``."""
    axes = tuple(axis for axis in plan.axes if axis.kind != BITS)
    return replace(plan, axes=axes, costs=tuple(c for c in plan.costs if c.unit != Bops.name))


def _terms(number: int, menu: Sequence[int]) -> Iterator[tuple[int, Layouts]]:
    """Yield the bits of an axis as a sum: the factor and the required slots of each term."""
    for level, (low, high) in enumerate(pairwise((0, *menu))):
        yield high - low, tuple(Slots(number, slot, slot + 1) for slot in range(1, level + 1))


def bit_price(plan: Plan, menu: Sequence[int]) -> CostModel:
    """Return the penalty on bits, in the unit ``bits``, for learning them without a budget.

    It is the regulariser of the paper (eq. 19 and section 4): Σ b·m/M·q₂ ⋯ q_b over all tensors and
    all bits b but the first, where q are P(z ≠ 0) of their gates, m the multiply-accumulates of the
    layers that a tensor is multiplied in, and M those of the layer that has most.
    """
    macs: dict[str, float] = defaultdict(float)
    owners: dict[int, set[str]] = defaultdict(set)
    for cost in plan.costs:
        if cost.unit == "macs":
            macs[cost.owner] += cost.scale * prod(dim.size for dim in cost.dims)
        elif cost.unit == Bops.name:
            met = (dim.axis for dim in cost.dims if isinstance(dim, Slots))
            for number in met:
                if plan.axes[number].kind == BITS:
                    owners[number].add(cost.owner)
    most, costs = max(macs.values(), default=1.0), []
    for number, of in owners.items():
        share = sum(macs[owner] for owner in of) / most
        for level in range(1, len(menu)):
            slots = tuple(Slots(number, slot, slot + 1) for slot in range(1, level + 1))
            costs.append(Cost(plan.axes[number].name, "bits", menu[level] * share, slots))
    return CostModel(plan, costs)


def bits_left(plan: Plan, open_: Tensor, menu: Sequence[int]) -> dict[str, int]:
    """Return the bits of each tensor under these open gates, by the name of the bits' axis.

    Shape: open_ bool, ``(plan.size,)``.
    """
    found = {}
    for axis in plan.axes:
        if axis.kind == BITS:
            levels = int(open_[axis.slice][1:].cumprod(0).sum())
            found[axis.name] = menu[levels]
    return found
