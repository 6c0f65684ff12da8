"""The type system: refinement must agree with what tensors really do."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from l0prune.infer.solver import Expr, Solver, Var, cat, pick, prod, variables
from l0prune.plan.layout import Cat, Const, Pick, Prod


def alive(solver: Solver, expr: Expr, dead: dict[Var, int]) -> list[bool]:
    """Position by position: is it alive when one slot of each variable in ``dead`` is closed?"""
    match solver.resolve(expr):
        case Const(size):
            return [True] * size
        case Var() as var:
            return [i != dead.get(var) for i in range(var.size)]
        case Cat(parts):
            return [a for part in parts for a in alive(solver, part, dead)]
        case Prod(factors):
            out = [True]
            for factor in factors:
                out = [a and b for a in out for b in alive(solver, factor, dead)]
            return out


def close_something(solver: Solver, expr: Expr) -> dict[Var, int]:
    return {var: var.size // 2 for var in variables(solver.resolve(expr)) if not var.pin}


def test_two_variables_become_one():
    solver = Solver()
    a, b = solver.fresh(8), solver.fresh(8)
    solver.unify(a, b)
    assert solver.resolve(a) is solver.resolve(b)


def test_a_product_splits_a_variable_into_factors():
    solver = Solver()
    flat, heads, inner = solver.fresh(24), solver.fresh(4), solver.fresh(6)
    solver.unify(flat, prod((heads, inner)))
    assert list(variables(solver.resolve(flat))) == [heads, inner]


def test_different_factorisations_refine_to_a_common_one():
    solver = Solver()
    a, b, c, d = (solver.fresh(n) for n in (4, 16, 8, 8))
    solver.unify(prod((a, b)), prod((c, d)))
    assert [v.size for v in variables(solver.resolve(prod((a, b))))] == [4, 2, 8]
    assert alive(solver, prod((a, b)), {}) == alive(solver, prod((c, d)), {})


def test_a_concatenation_meets_a_product_and_ties_the_parts():
    solver = Solver()
    left, right = solver.fresh(5), solver.fresh(5)
    group, inner = Const(2), solver.fresh(5)
    solver.unify(cat((left, right)), prod((group, inner)))
    assert solver.resolve(left) is solver.resolve(right) is solver.resolve(inner)


def test_rotated_halves_are_tied():
    solver = Solver()
    whole = solver.fresh(8)
    first, second = solver.split(whole, 4)
    solver.unify(whole, cat((second, first)))
    assert solver.resolve(first) is solver.resolve(second)


def test_a_split_inside_a_product_pins_the_outer_factor():
    solver = Solver()
    outer, inner = solver.fresh(3), solver.fresh(4)
    left, right = solver.split(prod((outer, inner)), 6)
    assert outer.pin is not None
    assert [v.size for v in variables(solver.resolve(inner))] == [2, 2]
    assert (left.size, right.size) == (6, 6)


def test_meeting_a_constant_pins_with_its_description():
    solver = Solver()
    var = solver.fresh(3)
    solver.unify(var, Const(3, "the image's colours"))
    assert var.pin is not None
    assert var.pin.text == "it meets the image's colours"


def test_slots_that_meet_in_another_order_become_one():
    """Swapping 0 and 1 ties them; 2 and 3 stay on their own."""
    solver = Solver()
    var = solver.fresh(4)
    solver.unify(var, pick(var, (1, 0, 2, 3)))
    found = solver.resolve(var)
    assert isinstance(found, Pick)
    assert (found.base.size, found.index) == (3, (0, 0, 1, 2))


def test_a_cycle_of_all_slots_leaves_one():
    solver = Solver()
    var = solver.fresh(4)
    solver.unify(var, pick(var, (1, 2, 3, 0)))
    found = solver.resolve(var)
    assert isinstance(found, Const)
    assert found.what == "a slot tied to every other one of its axis"


def test_an_order_moves_to_the_other_side():
    """c in another order is groups × channels: so c is these in the order before."""
    solver = Solver()
    var, group, channel = solver.fresh(4), solver.fresh(2), solver.fresh(2)
    solver.unify(pick(var, (1, 3, 0, 2)), prod((group, channel)))
    found = solver.resolve(var)
    assert isinstance(found, Pick)
    assert isinstance(found.base, Prod)
    assert found.index == (2, 0, 3, 1)
    assert isinstance(solver.resolve(pick(var, (1, 3, 0, 2))), Prod)


def test_some_first_positions_in_another_order_are_no_order_of_all():
    """Two of four slots that trade places with two of six: the others stay on their own."""
    solver, x, y = Solver(), Var(6), Var(4)
    one, other = pick(x, (1, 0)), pick(y, (0, 1))
    solver.unify(one, other)
    assert (solver.resolve(x).size, solver.resolve(y).size) == (6, 4)
    (joint,) = variables(solver.resolve(x))
    assert joint.size == 8
    for slot in range(8):
        assert alive(solver, one, {joint: slot}) == alive(solver, other, {joint: slot})


def test_slots_of_two_axes_that_meet_are_one_axis():
    """Four of eight slots, backwards, are another axis' four: eight are left, all told."""
    solver = Solver()
    long, short = solver.fresh(8), solver.fresh(4)
    solver.unify(pick(long, (3, 2, 1, 0)), pick(short, (0, 1, 2, 3)))
    assert solver.resolve(short).size == 4
    assert set(variables(solver.resolve(short))) == set(variables(solver.resolve(long)))


def test_a_product_in_an_order_that_mixes_its_factors_pins():
    solver = Solver()
    one = prod((solver.fresh(2), solver.fresh(3)))
    solver.unify(prod((solver.fresh(3), solver.fresh(2))), pick(one, (1, 0, 2, 3, 4, 5)))
    assert all(var.pin is not None for var in variables(solver.resolve(one)))


def test_a_flattened_map_is_channels_times_positions():
    solver = Solver()
    channel = solver.fresh(10)
    batch, flat = solver.regroup([Const(2), channel, Const(4), Const(4)], [2, 160])
    assert batch.size == 2
    dead = alive(solver, flat, {channel: 3})
    expected = torch.ones(10, 16, dtype=torch.bool)
    expected[3] = False
    assert dead == expected.flatten().tolist()


sizes = st.sampled_from([1, 2, 3, 4, 6])


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_reshapes_keep_every_position(shape, data):
    """However a tensor is reshaped, the same elements are dead as in the tensor itself."""
    solver = Solver()
    dims: list[Expr] = [solver.fresh(n) for n in shape]
    numel = torch.Size(shape).numel()
    divisors = [d for d in range(1, numel + 1) if numel % d == 0]
    first = data.draw(st.sampled_from(divisors))
    targets = [first, numel // first]
    out = solver.regroup(dims, targets)
    assert [d.size for d in out] == targets
    dead = close_something(solver, prod(dims))
    assert alive(solver, prod(dims), dead) == alive(solver, prod(out), dead)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_splits_of_concatenations_agree(sizes, data):
    """Two ways to cut the same positions see the same slots dead."""
    solver = Solver()
    parts: list[Expr] = [solver.fresh(n) for n in sizes]
    total = sum(sizes)
    at = data.draw(st.integers(0, total))
    whole = cat(parts)
    pieces = solver.split(whole, at)
    assert [p.size for p in pieces] == [at, total - at]
    dead = close_something(solver, whole)
    both = [a for piece in pieces for a in alive(solver, piece, dead)]
    assert both == alive(solver, whole, dead)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_unified_dims_die_together(sizes, copies):
    """Slot i of one side is dead exactly where slot i of the other is."""
    solver = Solver()
    left = prod((Const(copies), cat([solver.fresh(n) for n in sizes])))
    right = solver.fresh(left.size)
    solver.unify(left, right)
    dead = close_something(solver, left)
    assert alive(solver, left, dead) == alive(solver, right, dead)


def test_chains_longer_than_the_stack_are_resolved():
    solver = Solver()
    links = [solver.fresh(4) for _ in range(5000)]
    for first, second in pairwise(links):
        solver.unify(first, second)
    assert solver.resolve(links[0]) is solver.resolve(links[-1])


def test_a_long_dim_that_meets_itself_shifted_is_followed():
    solver = Solver()
    x = solver.fresh(3000)
    first, _ = solver.split(x, 2999)
    _, last = solver.split(x, 1)
    solver.unify(first, last)
    assert alive(solver, x, close_something(solver, x)) == [True] * 3000
    solver.pin(x, "it is read place by place")
