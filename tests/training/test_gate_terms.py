import pytest
import torch
from small_task import gated

import l0prune
from l0prune.errors import UsageError
from l0prune.plan.cost import CostModel
from l0prune.training.gate_settings import GateSettings
from l0prune.training.gate_terms import GateTerms, default_gate_rate
from l0prune.training.penalty import penalty
from l0prune.training.phases import Phases

PHASES = Phases(total=20, warmup=4, settle=5)
WARMING, PRUNING, SETTLING = 1, 10, 17


def controlled(n=240, **settings):
    model = gated()
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.log_alpha.normal_(0, 2, generator=torch.Generator().manual_seed(1))
    return model, GateTerms(model, gates, GateSettings(**settings), n, PHASES)


def test_lambda_is_in_examples():
    model, one = controlled(n=1000, lam="0.5/N")
    assert one.lam.default == 0.0005
    torch.testing.assert_close(one.penalty(PRUNING), penalty(model, 0.0005))


def test_lambda_of_an_axis_that_is_not_there_is_refused_before_training():
    with pytest.raises(UsageError, match="nowhere"):
        controlled(lam="nowhere=1/N")


def test_what_a_run_asks_for_is_remembered_until_something_else_opens_gates():
    model, one = controlled(budget={"params": 0.5, "macs": 0.6})
    gates = l0prune.gates(model)
    assert gates.asked == ("params=0.5", "macs=0.6")
    one.fit()
    assert gates.asked == ("params=0.5", "macs=0.6")
    gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
    assert gates.asked == ()


def test_the_factor_scales_lambda_and_not_the_l2_term():
    model, one = controlled(lam=0.01, l2=0.5)
    whole, count = penalty(model, 0.01, l2=0.5), penalty(model, 0.01)
    decay = whole - count
    torch.testing.assert_close(one.penalty(PRUNING), whole)
    torch.testing.assert_close(one.penalty(WARMING), 0.25 * count + decay)
    torch.testing.assert_close(one.penalty(SETTLING), decay)


def test_the_factor_scales_what_gates_say_beyond_their_prior():
    model, one = controlled(n=240, lam=0.01, prior=0.1, l2=0.5, l2_detach=True)
    priced = penalty(model, 0.01, n=240, prior=0.1)
    assert priced > penalty(model, 0.01)
    decay = penalty(model, 0.0, l2=0.5)
    torch.testing.assert_close(one.penalty(PRUNING), priced + decay)
    torch.testing.assert_close(one.penalty(WARMING), 0.25 * priced + decay)
    torch.testing.assert_close(one.penalty(SETTLING), decay)


def test_a_prior_that_makes_no_sense_is_refused_before_training():
    with pytest.raises(UsageError, match="nowhere"):
        controlled(prior={"nowhere": 0.5})
    with pytest.raises(UsageError, match="strictly between"):
        controlled(prior=1.5)


def test_without_lambda_and_l2_there_is_nothing_to_add():
    assert controlled(lam=0.01)[1].penalty(SETTLING) is None


def test_counting_is_as_asked():
    model, one = controlled(lam=0.01, counting="groups")
    torch.testing.assert_close(one.penalty(PRUNING), penalty(model, 0.01, counting="groups"))


def test_the_record_counts_what_an_export_would_keep():
    model, one = controlled()
    gates, cost = l0prune.gates(model), CostModel(l0prune.gates(model).plan)
    record = one.record()
    p = gates.open_probability().detach()
    for unit in ("params", "macs"):
        assert record[f"expected_{unit}"] == pytest.approx(cost.expected(p, unit).item())
        assert record[unit] == cost.actual(gates.open(), unit)
        assert record[f"dense_{unit}"] == cost.dense(unit)
    assert record["open"] == {axis.name: int(axis.open.sum()) for axis in gates.axes}
    assert record["dead"] == []
    bins = [((p >= k / 20) & (p < (k + 1) / 20)).sum().item() for k in range(20)]
    assert record["gates"] == bins
    assert sum(bins) == gates.plan.size


def test_an_axis_without_an_open_gate_is_dead():
    model, one = controlled()
    axis = l0prune.gates(model).axes[0]
    with torch.no_grad():
        l0prune.gates(model).log_alpha[axis.slice] = -9.0
    record = one.record()
    assert record["dead"] == [axis.name]
    assert record["open"][axis.name] == 1  # an export keeps one slot, whose weights are zero


def test_a_budget_is_on_while_gates_learn_and_needs_no_lambda():
    model, one = controlled(budget="params=0.5")
    assert one.lam.default == 0
    one.budget.multipliers = torch.tensor([2.0])
    torch.testing.assert_close(one.penalty(PRUNING), penalty(model, one.budget))
    assert one.penalty(SETTLING) is None


def test_a_budget_and_lambda_add_up():
    model, one = controlled(budget="params=0.5", lam=0.01)
    one.budget.multipliers = torch.tensor([2.0])
    expected = penalty(model, 0.01) + penalty(model, one.budget)
    torch.testing.assert_close(one.penalty(PRUNING), expected)


def test_before_the_gates_stand_the_export_just_meets_the_budget():
    model, one = controlled(budget="params=0.5", lam=0)
    one.fit()
    dense = CostModel(l0prune.gates(model).plan).dense("params")
    assert 0.45 * dense < one.record()["params"] <= 0.5 * dense
    assert one.record()["budget"]["params=0.5"]["share"] == one.record()["params"] / dense


def test_the_gates_rate_comes_from_the_steps_unless_it_is_given():
    assert controlled()[1].gate_lr == default_gate_rate(PHASES.learning)
    assert controlled(gate_lr=0.07)[1].gate_lr == 0.07
    assert default_gate_rate(100) == 0.3
    assert default_gate_rate(12_000) == 0.01
