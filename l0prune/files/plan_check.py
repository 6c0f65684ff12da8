"""Check of a plan from a file, so that a short text cannot cause unbounded work.

Gates, costs and masks allocate a vector for each layout, of the layout's size. So nothing in a
plan may be much larger than its model, whose tensors are in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from l0prune.plan.layout import Cat, Const, Gated, Layout, Pick, Prod, Slots
from l0prune.plan.numbers import is_count, is_number
from l0prune.plan.plan import Axis, Plan

# Every entry of a parameter is a position of few layouts; the rest is for tiny models.
_PER_ENTRY, _ALWAYS = 64, 2**24
_MOST_WORK = 1e30  # operations or bytes of one entry
_STEPS = 2**20  # more calls than any graph has


def check_plan(plan: Plan, model: nn.Module) -> None:
    """Refuse a plan whose axes, layouts or costs are invalid, or too large for this model.

    Raises:
        ValueError: the plan is invalid or too large.
    """
    entries = sum(p.numel() for p in model.parameters() if not p.is_meta)
    _check_axes(plan.axes)
    check_layouts(set(_layouts(plan)), plan.axes, _PER_ENTRY * entries + _ALWAYS)
    for site in plan.sites:
        if not is_count(site.dim):
            raise ValueError(f"a site at dim {site.dim!r}")
    for cost in plan.costs:
        is_known = cost.unit in ("params", "macs", "bops")
        if not is_number(cost.scale, most=_MOST_WORK) or not is_known:
            raise ValueError(f"costs of {cost.scale!r} {cost.unit!r}")
    for each in plan.activations:
        times = (each.made, each.last)
        is_known = is_number(each.scale, most=_MOST_WORK)
        if not (is_known and all(map(is_count, times)) and times[0] <= times[1] < _STEPS):
            raise ValueError(
                f"activations of {each.scale!r} bytes from {times[0]!r} to {times[1]!r}"
            )
    names = [*plan.tensors, *(s.tensor for s in plan.sites), *(c.tensor for c in plan.costs)]
    names += [*plan.parts, *plan.aliases, *plan.aliases.values(), *(c.owner for c in plan.costs)]
    names += [each.owner for each in plan.activations]
    if not all(map(is_count, (width for of in plan.allowed.values() for width in of))):
        raise ValueError("an axis may have a width that is no number of slots")
    numbers = [n for each in plan.divisors for n in (each.each, each.of_other, each.whole)]
    if not all(is_count(number) and number for number in numbers):
        raise ValueError("a divisor that is no number of slots")
    names += [name for each in plan.divisors for name in (each.axis, each.other)]
    names += [axis.name for axis in plan.axes]
    names += [name for group in (*plan.together, plan.allowed) for name in group]
    if not all(map(str.isprintable, names)):
        raise ValueError("a name that holds control characters")


def check_layouts(layouts: Iterable[Layout], axes: tuple[Axis, ...], limit: int) -> None:
    """Refuse layouts of axes that do not exist, or with more positions than the limit.

    Raises:
        ValueError: a layout is invalid, or all together have more positions.
    """
    total = 0
    for layout in layouts:
        size, depth = _measured(layout, axes, limit)
        total += size * depth
        if total > limit:
            raise ValueError(f"layouts of more than {limit:,} positions for a model of this size")


def _check_axes(axes: tuple[Axis, ...]) -> None:
    start = 0
    for axis in axes:
        numbers = (axis.size, axis.start, axis.group_size)
        if not all(map(is_count, numbers)) or axis.start != start or not axis.size:
            raise ValueError(f"an axis {axis.name!r} of {axis.size!r} slots from {axis.start!r}")
        start += axis.size
    if len({axis.name for axis in axes}) != len(axes):
        raise ValueError("two axes of one name")


def _layouts(plan: Plan) -> Iterator[Layout]:
    for dims in plan.tensors.values():
        yield from dims
    for site in plan.sites:
        yield site.layout
    for cost in plan.costs:
        yield from cost.dims
    for activation in plan.activations:
        yield from activation.dims


def _measured(layout: Layout, axes: tuple[Axis, ...], limit: int) -> tuple[int, int]:
    """Return a layout's number of positions, and the most gates at one (1 for none)."""
    match layout:
        case Const(size):
            found = size, 1
        case Slots(axis, start, stop):
            if not (is_count(axis) and axis < len(axes) and 0 <= start < stop <= axes[axis].size):
                raise ValueError(f"slots {start!r} to {stop!r} of axis {axis!r}")
            found = stop - start, 1
        case Cat(parts) | Prod(parts) if parts:
            inner = [_measured(part, axes, limit) for part in parts]
            sizes, depths = zip(*inner, strict=True)
            if isinstance(layout, Cat):
                found = sum(sizes), max(depths)
            else:
                found = _product(sizes, limit), sum(depths)
        case Gated(base, fine):
            (size, depth), (other, more) = (_measured(x, axes, limit) for x in (base, fine))
            if size != other:
                raise ValueError(f"{size} positions over {other}")
            found = size, depth + more
        case Pick(base, index):
            _, depth = _measured(base, axes, limit)
            found = len(index), depth
        case _:
            raise ValueError(f"a layout {layout!r}")
    if not is_count(found[0]) or found[0] > limit:
        raise ValueError(f"a layout of {found[0]!r} positions")
    return found


def _product(sizes: tuple[int, ...], limit: int) -> int:
    result = 1
    for size in sizes:
        result *= size
        if result > limit:
            raise ValueError(f"a layout of more than {limit:,} positions")
    return result
