"""Plans made by hand and by hypothesis, and their costs by enumeration of every gate state."""

from itertools import product
from math import prod

import torch
from hypothesis import strategies as st

from l0prune.plan.layout import Cat, Const, Gated, Pick, Prod, Slots, picked
from l0prune.plan.plan import Axis, Cost, Plan


def plan_of(sizes, costs, groups=None):
    """A plan with axes a0, a1, … of these sizes and these costs."""
    axes, start = [], 0
    for number, size in enumerate(sizes):
        group = groups[number] if groups else 1
        axes.append(Axis(f"a{number}", "channel", size, start, group))
        start += size
    return Plan(tuple(axes), (), {}, (), tuple(costs))


def whole(plan_sizes, number):
    return Slots(number, 0, plan_sizes[number])


def spread_by_hand(layout, values):
    """One value per position, straight from the definition; ``values`` gives those of slots."""
    match layout:
        case Const(size):
            return [1.0] * size
        case Slots():
            return list(values(layout))
        case Cat(parts):
            return [value for part in parts for value in spread_by_hand(part, values)]
        case Prod(factors):
            return list(map(prod, product(*(spread_by_hand(f, values) for f in factors))))
        case Gated(base, fine):
            pairs = zip(spread_by_hand(base, values), spread_by_hand(fine, values), strict=True)
            return list(map(prod, pairs))
        case Pick(base, index):
            whole = spread_by_hand(base, values)
            return [whole[number] for number in index]


def count(plan, cost, state):
    """The cost of one state of the gates, straight from the definition."""
    value = cost.scale
    for dim in cost.dims:
        value *= sum(spread_by_hand(dim, lambda slots: state[plan.flat(slots)].tolist()))
    return value


def enumerate_expected(plan, p, unit):
    """The expectation as the sum over all 2^gates states."""
    total = 0.0
    for bits in product((0.0, 1.0), repeat=plan.size):
        state = torch.tensor(bits, dtype=torch.float64)
        chance = float(torch.where(state > 0, p, 1 - p).prod())
        total += chance * sum(count(plan, c, state) for c in plan.costs if c.unit == unit)
    return total


def slots(sizes):
    """A range of some axis."""

    def pick(number):
        size = sizes[number]
        bounds = st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(
            lambda b: b[0] < b[1]
        )
        return bounds.map(lambda b: Slots(number, *b))

    return st.integers(0, len(sizes) - 1).flatmap(pick)


@st.composite
def layouts(draw, sizes, depth=2):
    """A layout of axes of these sizes: ranges, constants, concatenations, products, overlays."""
    kinds = ["slots", "const"] + (["cat", "prod", "gated", "pick"] if depth else [])
    match draw(st.sampled_from(kinds)):
        case "const":
            return Const(draw(st.integers(1, 3)))
        case "slots":
            return draw(slots(sizes))
        case "cat":
            return Cat(tuple(draw(st.lists(layouts(sizes, depth - 1), min_size=1, max_size=3))))
        case "prod":
            return Prod(tuple(draw(st.lists(layouts(sizes, depth - 1), min_size=1, max_size=2))))
        case "pick":
            base = draw(layouts(sizes, depth - 1))
            positions = st.integers(0, base.size - 1)
            return picked(base, tuple(draw(st.lists(positions, min_size=1, max_size=4))))
        case _:
            return draw(overlays(sizes, depth))


@st.composite
def overlays(draw, sizes, depth):
    """A ``Gated`` whose fine layout is made to fit the base."""
    base = draw(layouts(sizes, depth - 1))
    leaf = draw(slots(sizes))
    times, left = divmod(base.size, leaf.stop - leaf.start)
    if times and not left:
        return Gated(base, Prod((Const(times), leaf)))
    if times == 0:
        return Gated(base, Slots(leaf.axis, leaf.start, leaf.start + base.size))
    return Gated(base, Cat((leaf, Const(base.size - leaf.stop + leaf.start))))


@st.composite
def plans(draw):
    """A plan with at most 8 gates and costs over arbitrary layouts."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: sum(s) <= 8))
    costs = []
    for number in range(draw(st.integers(1, 3))):
        dims = draw(st.lists(layouts(sizes), max_size=3))
        unit = draw(st.sampled_from(["params", "macs"]))
        scale = draw(st.sampled_from([1.0, 9.0, 0.5]))
        costs.append(Cost(f"m{number}", unit, scale, tuple(dims)))
    return plan_of(sizes, costs)


def probabilities(size):
    chances = st.floats(0, 1, width=32)
    return st.lists(chances, min_size=size, max_size=size).map(
        lambda values: torch.tensor(values, dtype=torch.float64)
    )
