"""What the code of a model knows of sizes: read back, changed with the plan, and kept alike."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of

from l0prune.plan.code import Code, Factor
from l0prune.plan.layout import Cat, Const, Prod, Slots
from l0prune.plan.plan import Plan

A, B, C = Slots(0, 0, 4), Slots(1, 0, 8), Slots(2, 0, 8)
CODE = Code(
    {"attention": (B, Prod((Const(2), B)))},
    {"norm": (Const(2), C)},
    (Factor("q.weight", 0, ((0, 4), (8, 9)), B),),
)


def test_json_reads_back():
    plan = replace(plan_of([4, 8, 8], ()), code=CODE, alike=((B, C), (Cat((A, A)), B)))
    assert Plan.from_json(plan.to_json()) == plan


def test_of_axes_that_are_not_gated_it_knows_constants():
    plan = replace(plan_of([4, 8, 8], ()), code=CODE, alike=((B, C),)).select(["a1"])
    there = Slots(0, 0, 8)
    assert plan.alike == ((there, Const(8)),)
    assert plan.code.averages == {"norm": (Const(2), Const(8))}
    assert plan.code.queries[0].head == there


@given(st.lists(st.booleans(), min_size=20, max_size=20))
def test_dims_that_are_alike_keep_as_many_slots_and_no_open_one_goes(bits):
    """Also where one is made of another twice, and through a third."""
    plan = replace(plan_of([4, 8, 8], ()), alike=((B, C), (Cat((A, A)), B)))
    open_ = torch.tensor(bits)
    kept = plan.kept(open_)
    sizes = [int(plan.mask(dim, kept).sum()) for dim in (Cat((A, A)), B, C)]
    alone = replace(plan, alike=()).kept(open_)
    widest = max(int(plan.mask(dim, alone).sum()) for dim in (Cat((A, A)), B, C))
    assert sizes == [widest + widest % 2] * 3
    assert bool((kept >= alone).all())
