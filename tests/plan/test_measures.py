import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import count, enumerate_expected, plan_of, plans, probabilities, whole

from l0prune.errors import UsageError
from l0prune.plan.cost import Amounts, CostModel
from l0prune.plan.measures import (
    Macs,
    Measure,
    Params,
    SumOfTerms,
    Width,
    measure_of,
    names,
    register,
)
from l0prune.plan.plan import Cost

SIZES = [3, 4]
PLAN = plan_of(
    SIZES,
    [
        Cost("m", "params", 2.0, (whole(SIZES, 0), whole(SIZES, 1))),
        Cost("n", "params", 5.0, (whole(SIZES, 1),)),
        Cost("n", "params", 7.0, ()),
        Cost("m", "macs", 10.0, (whole(SIZES, 0),)),
    ],
)


class OfTerms(SumOfTerms):
    name, label, suffixes = "weight", "weight", {"kg": 1.0, "g": 1e-3}


def test_params_and_macs_are_there_first():
    assert names()[:5] == ("params", "macs", "width", "heads", "latency")
    assert isinstance(measure_of(PLAN, "params"), Params)
    assert isinstance(measure_of(PLAN, "macs"), Macs)


@given(plans(), st.data())
def test_params_and_macs_are_what_the_plan_costs(plan, data):
    p = data.draw(probabilities(plan.size))
    for kind in (Params, Macs):
        measure = kind(plan)
        assert float(measure.expected(p)) == pytest.approx(
            enumerate_expected(plan, p, kind.name), rel=1e-12, abs=1e-12
        )
        assert measure.dense() == CostModel(plan).dense(kind.name)
        assert isinstance(measure.dense(), int)


@given(plans(), st.data())
def test_a_width_is_the_number_of_slots_of_each_axis(plan, data):
    width, p = Width(plan), data.draw(probabilities(plan.size))
    open_ = p > 0.5
    for number, axis in enumerate(plan.axes):
        assert width.dense({number}) == axis.size
        assert width.actual(open_, {number}) == int(plan.kept(open_)[axis.slice].sum())
        assert float(width.expected(p, through=frozenset([number]))) == pytest.approx(
            float(p[axis.slice].sum()), rel=1e-12, abs=1e-12
        )


@given(plans(), st.data())
def test_the_defaults_of_a_measure_are_what_a_sum_of_terms_says(plan, data):
    """Actual, dense and reachable follow from what is expected."""
    costs = CostModel(plan, [Cost(c.owner, "weight", c.scale, c.dims) for c in plan.costs])

    class OnlyExpected(Measure):
        def expected(self, p, dtype=None, through=None):
            return costs.expected(p, "weight", dtype=dtype, through=through)

    bare, terms = OnlyExpected(plan), OfTerms(plan, costs)
    open_ = data.draw(probabilities(plan.size)) > 0.5
    through = frozenset([0])
    for one in (None, through):
        assert bare.actual(open_, one) == pytest.approx(terms.actual(open_, one))
        assert bare.dense(one) == pytest.approx(terms.dense(one))
    if terms.dense():
        assert bare.reachable() == pytest.approx(terms.reachable())
    assert terms.axes <= bare.axes == frozenset(range(len(plan.axes)))


def test_terms_of_a_measure_are_no_counts():
    costs = CostModel(
        PLAN, [Cost("m", "weight", 0.25, (whole(SIZES, 0),)), Cost("", "weight", 1, ())]
    )
    measure = OfTerms(PLAN, costs)
    assert measure.dense() == 1.75
    assert measure.dense(frozenset([0])) == 0.75
    open_ = torch.tensor([True, False, False, True, True, True, True])
    assert measure.actual(open_) == 1.25
    assert measure.by_owner(open_.double()) == {"m": 0.25, "": 1.0}
    assert measure.axes == {0}
    assert measure.reachable() == pytest.approx(0.75 / 1.75)
    assert measure.blocks() is None


@given(plans(), st.data())
def test_amounts_are_the_terms_one_by_one(plan, data):
    open_ = data.draw(probabilities(plan.size)) > 0.5
    sizes = Amounts(plan, plan.costs).expected(open_.double())
    assert sizes.tolist() == pytest.approx([count(plan, c, open_.double()) for c in plan.costs])
    through = Amounts(plan, plan.costs).expected(open_.double(), frozenset())
    assert through.tolist() == [0.0] * len(plan.costs)


@given(plans(), st.data())
def test_amounts_have_the_gradient_of_their_sum(plan, data):
    p = data.draw(probabilities(plan.size)).requires_grad_()
    weights = torch.arange(1.0, 1 + len(plan.costs), dtype=torch.float64)
    priced = [
        Cost(c.owner, "weight", c.scale * float(w), c.dims)
        for c, w in zip(plan.costs, weights, strict=True)
    ]
    (mine,) = torch.autograd.grad(Amounts(plan, plan.costs).expected(p) @ weights, p)
    (theirs,) = torch.autograd.grad(CostModel(plan, priced).expected(p, "weight"), p)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_amounts_are_shown_in_their_unit():
    assert [Params.show(77_312), Params.brief(77_312), Macs.brief(1.82e9)] == [
        "77,312", "77.3 k", "1.82 G"
    ]  # fmt: skip
    assert [OfTerms.show(0.012345), OfTerms.brief(12_345)] == ["0.0123 kg", "12,345 kg"]


def test_milliseconds_take_a_table():
    with pytest.raises(UsageError, match=r"l0prune measure .*l0prune\.measure\(model\)"):
        measure_of(PLAN, "latency")


def test_a_source_makes_what_a_plan_cannot():
    made = OfTerms(PLAN, CostModel(PLAN, []))

    class Table:
        name = "latency"

        def of(self, plan):
            assert plan is PLAN
            return made

    assert measure_of(PLAN, "latency", [Table()]) is made
    assert isinstance(measure_of(PLAN, "params", [Table()]), Params)


def measure_called(name="speed", suffixes=None):
    body = {"name": name, "label": name, "suffixes": suffixes or {"m": 1.0}}
    return type("Speed", (Measure,), body)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (OfTerms(PLAN), "no measure"),
        (type("Nothing", (), {}), "no measure"),
        (type("Nameless", (Measure,), {"label": "x"}), "has no name and no suffixes"),
        (measure_called("two words"), "cannot be called"),
        (measure_called("params"), "another measure called 'params'"),
        (measure_called(suffixes={"m": 2.0}), "the first of them worth 1"),
        (measure_called(suffixes={"m": 1.0, "km/h": 3.6}), "letters only"),
    ],
)
def test_what_cannot_be_registered_is_refused(kind, why):
    before = names()
    with pytest.raises(UsageError, match=why):
        register(kind)
    assert names() == before
