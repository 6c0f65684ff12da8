"""Times of modules that whole branches have to themselves."""

from __future__ import annotations

import pytest
import torch
from residual import Residual

import l0prune
from l0prune.features.latency.eager import Eager
from l0prune.features.latency.facts import (
    FACTS,
    INPUT,
    Group,
    NodeFacts,
    groups_of,
    number_of,
    plan_id,
)
from l0prune.features.latency.latency import OVERHEAD, TimedLatency
from l0prune.features.latency.latency_model import LatencyModel, Step, Term
from l0prune.features.latency.network_files import NetworkFiles
from l0prune.features.latency.runtimes import AlternatingTimer
from l0prune.files.checked_json import parsed
from l0prune.plan.branch import Branch

X = torch.zeros(2, 3, 8, 8)


def gated(**kwargs):
    torch.manual_seed(0)
    return l0prune.gate(Residual().eval(), X, **kwargs)


@pytest.fixture
def plan():
    return l0prune.gates(gated(branches=True)).plan


def latency(plan):
    """Half a millisecond of each slot of ``inner``, one of ``outer``, two of ``stem``."""
    layout = plan.tensors["inner.weight"][0]
    (branch,) = plan.branches
    gone = {"inner": (branch.name,), "outer": (branch.name,), "stem": ()}
    groups = [Group(x, "Conv", (str(n),), ((),), gone[x]) for n, x in enumerate(OWNERS)]
    terms = Term(0, 0.5, (Step(0, 1),)), Term(1, 1.0, ()), Term(2, 2.0, ()), Term(3, 0.25, ())
    stairs = LatencyModel((layout,), terms)
    return TimedLatency(plan, groups, stairs, stairs, 16.0, lambda model: None)


OWNERS = ("inner", "outer", "stem")


def test_what_is_gone_takes_no_time(plan):
    (switch,) = (axis for axis in plan.axes if axis.kind == "branch")
    measure, open_ = latency(plan), torch.ones(plan.size, dtype=torch.bool)
    assert measure.actual(open_) == 0.5 * 24 + 1 + 2 + 0.25
    open_[switch.start] = False
    assert measure.actual(open_) == 2.25
    owners = measure.by_owner(plan.kept(open_).double())
    assert owners == {"inner": 0, "outer": 0, "stem": 2, OVERHEAD: 0.25}
    number = plan.axes.index(switch)
    assert measure.actual(torch.ones_like(open_), frozenset([number])) == 13


def test_expected_times_follow_the_switch(plan):
    (switch,) = (axis for axis in plan.axes if axis.kind == "branch")
    p = torch.rand(plan.size, dtype=torch.float64, requires_grad=True)
    expected = latency(plan).expected(p)
    inner = plan.axes[next(i for i, axis in enumerate(plan.axes) if axis.name == "inner")]
    of_branch = 0.5 * p[inner.slice].sum() + 1
    assert expected.item() == pytest.approx((2.25 + p[switch.start] * of_branch).item())
    (slope,) = torch.autograd.grad(expected, p)
    assert slope[switch.start].item() == pytest.approx(of_branch.item())


def test_what_goes_with_a_branch_is_its_modules_and_the_sum_and_nothing_of_the_stream(tmp_path):
    model = gated(branches=True)
    plan = l0prune.gates(model).plan
    (branch,) = plan.branches
    for facts in (NetworkFiles(model, 1, tmp_path).facts, eager_facts(model)):
        every = [{number_of(number): 1.0 for number in range(len(facts))}]
        groups = groups_of(facts, every, plan.branches)
        gone = [facts[int(g.nodes[0])] for g in groups if g.branches == (branch.name,)]
        stays = [facts[int(g.nodes[0])] for g in groups if not g.branches]
        assert {"inner", "outer"} <= {each.owner for each in gone}
        assert "head" in {each.owner for each in stays}
        assert [each.operator.lower() for each in gone if each.owner == ""].count("add") == 1


def test_what_reads_the_input_and_a_branch_stays():
    facts = [
        NodeFacts("Conv", "branch", True, (INPUT,), ((),)),
        NodeFacts("QuantizeLinear", "", False, (0,), ((),)),
        NodeFacts("Add", "", False, (INPUT, 1), ((),)),
        NodeFacts("Conv", "after", True, (2,), ((),)),
    ]
    times = [{number_of(number): 1.0 for number in range(4)}]
    groups = groups_of(facts, times, [Branch("branch", ("w",), 1, ("branch",))])
    assert [group.branches for group in groups] == [("branch",)] * 3 + [()]


def eager_facts(model):
    about = AlternatingTimer(model, Eager("cpu", 1), 1).facts()
    return parsed(FACTS, about["nodes"])


@pytest.mark.slow
def test_one_table_serves_with_switches_and_without(plan):
    assert plan_id(plan) == plan_id(l0prune.gates(gated()).plan)
    assert plan_id(plan) != plan_id(l0prune.gates(gated(exclude="inner")).plan)


@pytest.mark.slow
def test_a_budget_in_milliseconds_is_observed_without_a_branch(tmp_path, timed):
    model = gated(branches=True)
    table = l0prune.measure(model, samples=12)
    (switch,) = (axis for axis in l0prune.gates(model).axes if axis.kind == "branch")
    scores = torch.ones(l0prune.gates(model).plan.size)
    scores[switch.slice] = 0
    l0prune.fit(model, "latency=0.8", scores, latency=table, kinds="branch")
    small = l0prune.export(model)
    assert small.gone == (switch.name,)
    small.save_onnx(tmp_path / "model.onnx")
    assert small.times.share < 0.9
