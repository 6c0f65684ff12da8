from dataclasses import replace

from plans import plan_of, whole

from l0prune.plan.activations import Activation, steps
from l0prune.plan.layout import Const
from l0prune.plan.plan import Plan

SIZES = [3, 4]
FIRST = Activation("conv", 196.0, (whole(SIZES, 0), whole(SIZES, 1)), 0, 2)
LAST = Activation("table", 12.0, (), 1, 4, True)
PLAN = replace(plan_of(SIZES, []), activations=(FIRST, LAST))


def test_they_are_read_back_with_their_plan():
    assert Plan.from_json(PLAN.to_json()) == PLAN


def test_axes_that_are_left_out_of_a_plan_stay_whole_in_them():
    (first, last) = PLAN.select(["a1"]).activations
    assert first.dims == (Const(3), whole([4], 0))
    assert last == LAST


def test_a_graph_may_run_after_another_one_and_for_more_examples():
    assert steps([FIRST, LAST]) == 5
    assert steps([]) == 0
    assert FIRST.later(5) == replace(FIRST, made=5, last=7)
    assert FIRST.of_examples(2.5).scale == 490.0
    assert LAST.of_examples(2.5) is LAST
