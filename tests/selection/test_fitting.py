"""Amounts that go up and down in steps: what is handed out meets the budget all the same."""

import pytest
import torch
from example_counts import costly
from hypothesis import given
from hypothesis import strategies as st
from residual import SIZE, gated, random_scores
from stairs import BLOCK, Stairs, registered

import l0prune
from l0prune.errors import UsageError
from l0prune.plan.measures import Params
from l0prune.selection import fitted
from l0prune.selection.fitting import blocks_of


@pytest.fixture(scope="module", autouse=True)
def _stairs():
    with registered(Stairs):
        yield


@costly
@given(
    seed=st.integers(0, 10**6), share=st.floats(0.2, 1.0), round_to=st.sampled_from([1, 3, "auto"])
)
def test_no_choice_is_over_the_budget(seed, share, round_to):
    model = gated(random_scores(seed, SIZE))
    counts = l0prune.fit(model, f"stairs={share}, params=0.9", round_to=round_to)
    gates, measure = l0prune.gates(model), Stairs(l0prune.gates(model).plan)
    real = measure.actual(gates.open())
    assert counts[f"stairs={share:g}"] == real <= share * measure.dense()
    params = Params(gates.plan)
    assert counts["params=0.9"] == params.actual(gates.open()) <= 0.9 * params.dense()


def test_widths_are_those_that_the_measure_likes():
    model = gated(random_scores(0, SIZE))
    counts = l0prune.fit(model, "stairs=0.5")
    gates, measure = l0prune.gates(model), Stairs(l0prune.gates(model).plan)
    assert all(int(axis.open.sum()) % BLOCK == 0 for axis in gates.axes)
    # No axis has room for a block more.
    for axis in gates.axes:
        more = gates.open()
        more[torch.arange(SIZE)[axis.slice][~more[axis.slice]][:BLOCK]] = True
        assert axis.open.all() or measure.actual(more) > 0.5 * measure.dense()
    assert counts["stairs=0.5"] > 0.35 * measure.dense()


def test_several_likings_are_met_together():
    plan = l0prune.gates(gated()).plan

    class Sixes(Stairs):
        def blocks(self):
            return [6, 6][: len(plan.axes)]

    assert blocks_of(plan, "auto", [Stairs(plan), Sixes(plan)]) == [12] * len(plan.axes)
    assert blocks_of(plan, "auto", []) == [1] * len(plan.axes)


def test_a_table_gives_its_blocks_to_a_budget_in_macs():
    class Table:
        name = "stairs"

        def of(self, plan):
            return Stairs(plan)

    model = gated(random_scores(0, SIZE))
    l0prune.fit(model, "macs=0.5", latency=Table())
    assert all(int(axis.open.sum()) % BLOCK == 0 for axis in l0prune.gates(model).axes)


def test_an_amount_is_absolute_with_its_unit():
    model = gated(random_scores(0, SIZE))
    dense = Stairs(l0prune.gates(model).plan).dense()
    text = f"stairs={dense / 2000:.15g}kst"
    ((limit, found),) = l0prune.fit(model, text).items()
    assert limit == text
    assert found <= dense / 2


def test_what_cannot_be_met_is_said_in_the_measures_own_words():
    with pytest.raises(UsageError, match=r"in blocks of 4.* st of .* st steps stay"):
        l0prune.fit(gated(), "stairs=0.001")


def test_blocks_that_nobody_asked_for_stand_in_no_budgets_way(monkeypatch):
    monkeypatch.setattr(Stairs, "blocks", lambda of: [axis.size for axis in of.plan.axes])
    model = gated(random_scores(0, SIZE))
    counts = l0prune.fit(model, "stairs=0.4")
    assert counts["stairs=0.4"] <= 0.4 * Stairs(l0prune.gates(model).plan).dense()
    widths = [(int(axis.open.sum()), axis.size) for axis in l0prune.gates(model).axes]
    assert all(2 * width % size == 0 for width, size in widths), widths
    with pytest.raises(UsageError, match=r"stairs=0.001 cannot be met.*in blocks of"):
        l0prune.fit(gated(), "stairs=0.001")


def test_learning_under_stairs_ends_within_them():
    model = gated()
    pruner = l0prune.Pruner(model, budget="stairs=0.5", steps=30, say=lambda text: None)
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))
    optimizer = torch.optim.Adam(pruner.param_groups())
    for _ in range(30):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
    record, metrics = pruner.record(), pruner.metrics()
    assert record["stairs"] <= 0.5 * record["dense_stairs"]
    assert metrics["stairs"] == record["stairs"] / record["dense_stairs"]
    assert {"expected_stairs", "expected_macs", "macs", "params"} <= metrics.keys()


def test_slots_that_only_fill_blocks_are_counted():
    model, told = gated(random_scores(3, SIZE)), []
    gates = l0prune.gates(model)
    with fitted.watched(told.append):
        l0prune.fit(model, "params=0.5", round_to=1)
        single = {axis.name: int(axis.open.sum()) for axis in gates.axes}
        l0prune.fit(model, round_to=BLOCK)
    assert told[0].filling == {}
    blocks = {axis.name: int(axis.open.sum()) for axis in gates.axes}
    added = {name: blocks[name] - single[name] for name in blocks}
    assert told[1].filling == {name: count for name, count in added.items() if count}
    assert any(added.values())


def test_what_a_budget_opens_in_blocks_is_asked_for_by_its_scores():
    model, told = gated(random_scores(5, SIZE)), []
    with fitted.watched(told.append):
        l0prune.fit(model, "params=0.6", round_to=BLOCK)
    gates, (found,) = l0prune.gates(model), told
    for axis in gates.axes:
        assert found.filling.get(axis.name, 0) < BLOCK
        assert int(axis.open.sum()) % BLOCK == 0 or bool(axis.open.all())


class Cliff(Stairs):
    """Twice as much wherever a width is not whole: a fast path that asks for all of an axis."""

    name = "cliff"

    def actual(self, open_, through=None):
        kept = self.plan.kept(open_).double()
        misses = sum(0 < int(kept[axis.slice].sum()) < axis.size for axis in self.plan.axes)
        macs = self.costs.amount(kept, self.name, through)
        return macs * 2**misses

    def blocks(self):
        return [1] * len(self.plan.axes)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.one_in(2)
def test_no_axis_is_cut_where_that_takes_more(seed):
    with registered(Cliff):
        model = gated(random_scores(seed, SIZE))
        l0prune.fit(model, "cliff=0.9")
    gates = l0prune.gates(model)
    measure = Cliff(gates.plan)
    now = measure.actual(gates.open())
    assert now <= 0.9 * measure.dense()
    for axis in gates.axes:
        whole = gates.open()
        whole[axis.slice] = True
        assert axis.open.all() or measure.actual(whole) > now
