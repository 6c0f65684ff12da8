"""A budget in milliseconds, with a table that knows its network: from settings to records."""

import json

import pytest
import torch
from small_task import data, gated

import l0prune
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.plan.cost import CostModel
from l0prune.plan.measures import Latency
from l0prune.plan.plan import Cost

QUIET = {"epochs": 3, "batch_size": 30, "progress": False, "ema": 0}


class Times(Latency):
    """A microsecond a MAC, and two for the call itself; a tenth more is seen."""

    factor = 1.1

    def __init__(self, plan):
        terms = [Cost(c.owner, "latency", c.scale / 1e3, c.dims) for c in plan.costs]
        terms = [t for t, c in zip(terms, plan.costs, strict=True) if c.unit == "macs"]
        call = Cost("the call itself", "latency", 0.002, ())
        super().__init__(plan, CostModel(plan, [*terms, call]))

    def blocks(self):
        return [2] * len(self.plan.axes)

    def observed(self, model):
        return self.factor * self.actual(l0prune.gates(model).open())


class Table:
    name = "latency"

    def __init__(self, model):
        self.plan = l0prune.gates(model).plan

    def of(self, plan):
        if plan != self.plan:
            raise UsageError("this table is of another network")
        return Times(plan)

    def __str__(self):
        return "the times of one machine"


def test_it_is_met_by_what_is_seen(tmp_path):
    model = gated()
    table = Table(model)
    settings = {**QUIET, "budget": "latency=0.6", "latency": table, "out": tmp_path}
    history = l0prune.finetune(model, data(), **settings)
    last = history.last
    gates, measure = l0prune.gates(model), Times(table.plan)
    assert last["latency"] == measure.actual(gates.open())
    assert last["dense_latency"] == measure.dense()
    assert measure.observed(model) <= 0.6 * measure.dense() < 1.2 * measure.observed(model)
    assert all(int(axis.open.sum()) % 2 == 0 or axis.open.all() for axis in gates.axes)
    assert f"latency {last['latency']:.3g} ms" in repr(history)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["expected_latency"]
    again = l0prune.finetune(gated(), data(), **settings, resume=True)
    assert again.last == last


def test_an_export_of_what_is_seen_to_meet_it_has_no_warning(monkeypatch):
    """Though the table predicts more than the budget of it."""
    monkeypatch.setattr(Times, "factor", 0.7)
    model = gated()
    table = Table(model)
    l0prune.finetune(model, data(), **{**QUIET, "epochs": 1}, budget="latency=0.6", latency=table)
    measure = Times(table.plan)
    open_ = l0prune.gates(model).open()
    assert measure.observed(model) <= 0.6 * measure.dense() < measure.actual(open_)
    l0prune.export(model)
    l0prune.gates(model).log_alpha.data.fill_(9.0)
    with pytest.warns(L0pruneWarning, match="exceed the budget of the run"):
        l0prune.export(model)


def test_milliseconds_are_absolute():
    model = gated()
    measure = Times(l0prune.gates(model).plan)
    most = 0.5 * measure.dense()
    asked = f"latency={1e3 * most:.3f}us"
    ((text, seen),) = l0prune.fit(
        model,
        asked,
        l0prune.score(model, "magnitude"),
        latency=Table(model),
    ).items()
    assert text == asked
    assert 0.7 * most < seen <= most


def test_it_takes_a_table_of_this_network():
    other = Table(l0prune.gate(torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.zeros(2, 4)))
    for make in (
        lambda **given: l0prune.fit(gated(), **given),
        lambda **given: l0prune.finetune(gated(), data(), **QUIET, **given),
        lambda **given: l0prune.Pruner(gated(), steps=9, **given),
    ):
        for budget in ("latency=0.5", "macs=0.5"):
            with pytest.raises(UsageError, match="of another network"):
                make(budget=budget, latency=other)


def test_what_no_gate_removes_is_named():
    model = gated()
    with pytest.raises(UsageError, match=r"ms latency stay .*the call itself \(0\.002 ms\)"):
        l0prune.fit(model, "latency=3us", latency=Table(model), round_to=1)


def test_gates_round_to_its_blocks_without_a_budget():
    model = gated()
    with torch.no_grad():
        log_alpha = l0prune.gates(model).log_alpha
        log_alpha.copy_(
            4 * torch.randn(log_alpha.shape, generator=torch.Generator().manual_seed(1))
        )
    l0prune.fit(model, latency=Table(model))
    axes = l0prune.gates(model).axes
    assert all(int(axis.open.sum()) % 2 == 0 or axis.open.all() for axis in axes)
