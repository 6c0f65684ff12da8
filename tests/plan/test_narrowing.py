"""Plans of what is left when slots are cut out: the same as closing their gates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import count, layouts, plan_of, plans

from l0prune.errors import UsageError
from l0prune.plan.code import Code, Factor
from l0prune.plan.layout import Cat, Const, Gated, Pick, Prod, Slots
from l0prune.plan.plan import Cost, Plan, Site


@st.composite
def kept_slots(draw, plan):
    """Slots that stay: at least one of each axis."""
    kept = torch.tensor(draw(st.lists(st.booleans(), min_size=plan.size, max_size=plan.size)))
    for axis in plan.axes:
        kept[axis.start + draw(st.integers(0, axis.size - 1))] = True
    return kept


@given(st.data())
def test_positions_that_stay_have_the_values_that_they_had(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    layout, plan = data.draw(layouts(sizes)), plan_of(sizes, [])
    kept = data.draw(kept_slots(plan))
    plan = Plan(plan.axes, (), {"t": (layout,)}, (), ())
    (small,) = plan.narrowed(kept).tensors["t"]
    values = torch.arange(2, 2 + plan.size)
    mask = plan.mask(layout, kept)
    left = plan.narrowed(kept).spread(small, values[kept])
    assert torch.equal(left, plan.spread(layout, values)[mask])
    assert small.size == int(mask.sum())


@given(plans(), st.data())
def test_it_costs_what_the_whole_network_does_with_these_gates_closed(plan, data):
    kept = data.draw(kept_slots(plan))
    small = plan.narrowed(kept)
    fewer = data.draw(kept_slots(small))
    state = torch.zeros(plan.size, dtype=torch.float64)
    state[kept] = fewer.double()
    for before, after in zip(plan.costs, small.costs, strict=True):
        assert count(small, after, fewer.double()) == count(plan, before, state)


@given(plans(), st.data())
def test_cutting_twice_is_cutting_once(plan, data):
    kept = data.draw(kept_slots(plan))
    once = plan.narrowed(kept)
    fewer = data.draw(kept_slots(once))
    both = kept.clone()
    both[kept] = fewer
    twice, direct = once.narrowed(fewer), plan.narrowed(both)
    assert twice.axes == direct.axes
    values = torch.arange(2, 2 + direct.size)
    for one, other in zip(twice.costs, direct.costs, strict=True):
        for a, b in zip(one.dims, other.dims, strict=True):
            assert torch.equal(twice.spread(a, values), direct.spread(b, values))


def test_layouts_of_what_is_left():
    maps, fine = Slots(0, 0, 3), Slots(1, 0, 6)
    columns = Gated(Prod((maps, Const(2))), fine)
    plan = plan_of([3, 6], [])
    plan = Plan(
        plan.axes,
        (),
        {
            "cat": (Cat((Const(2), Slots(0, 1, 3))),),
            "columns": (columns,),
            "turned": (Pick(maps, (2, 0, 1, 0)),),
        },
        (Site("columns", 0, columns, "read"),),
        (Cost("m", "params", 2.0, (columns,)),),
        code=Code(queries=(Factor("turned", 0, ((0, 2), (3, 4)), maps),)),
    )
    kept = torch.tensor([True, False, True, True, False, True, True, True, True])
    small = plan.narrowed(kept)
    assert [(a.start, a.size, a.group_size) for a in small.axes] == [(0, 2, 1), (2, 5, 1)]
    assert small.tensors["cat"] == (Cat((Const(2), Slots(0, 1, 2))),)
    left = Gated(Pick(Prod((Slots(0, 0, 2), Const(2))), (0, 2, 3)), Pick(Slots(1, 0, 5), (0, 3, 4)))
    assert small.tensors["columns"] == (left,)
    assert small.sites[0].layout == left
    assert small.tensors["turned"] == (Pick(Slots(0, 0, 2), (1, 0, 0)),)
    assert small.code.queries[0].ranges == ((0, 2), (2, 3))
    assert Plan.from_json(small.to_json()) == small


def test_gates_that_are_fewer_than_what_cuts_a_layer_meet_what_is_left_of_it():
    """Two heads of three: one gate a head here, and the heads' positions are cut as well."""
    heads, inner = Slots(0, 0, 2), Slots(1, 0, 3)
    plan = Plan(
        plan_of([2, 3], []).axes,
        (),
        {"out": (Prod((heads, inner)),)},
        (Site("out", 0, Prod((heads, Const(3))), "read"),),
        (),
    )
    small = plan.narrowed(torch.tensor([True, True, True, False, True]))
    (site,) = small.sites
    assert small.tensors["out"] == (Prod((heads, Slots(1, 0, 2))),)
    values = torch.tensor([5, 7, 1, 1])
    assert small.spread(site.layout, values).tolist() == [5, 5, 7, 7]


def test_one_slot_of_each_axis_stays():
    with pytest.raises(UsageError, match="all slots of a1 would be cut"):
        plan_of([2, 2], []).narrowed(torch.tensor([True, True, False, False]))
