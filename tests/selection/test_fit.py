from itertools import pairwise

import pytest
import torch
import with_branches
from example_counts import costly
from hypothesis import given
from hypothesis import strategies as st
from residual import SIZE, gated, random_scores
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.plan.cost import CostModel
from l0prune.selection.fit import fit


@costly
@given(
    seed=st.integers(0, 10**6),
    unit=st.sampled_from(["params", "macs"]),
    share=st.floats(0.2, 1.0),
    round_to=st.sampled_from([1, 1, 4]),
)
def test_the_export_has_no_more_than_the_budget_and_hardly_less(seed, unit, share, round_to):
    model = gated(random_scores(seed, SIZE))
    counts = fit(model, f"{unit}={share}", round_to=round_to)
    gates = l0prune.gates(model)
    dense = CostModel(gates.plan).dense(unit)
    exported = l0prune.export(model)
    real = exported.params if unit == "params" else exported.macs
    assert list(counts.values()) == [real]
    # The largest slot there is: a map of the stem's output is read and written three times.
    largest = max(
        dense - CostModel(gates.plan).actual(torch.arange(SIZE) != slot, unit)
        for slot in range(SIZE)
    )
    assert share * dense - round_to * largest < real <= share * dense
    for axis in gates.axes:
        assert int(axis.open.sum()) % round_to == 0 or axis.open.all()


def test_the_name_of_a_score_is_no_scores():
    model = gated(random_scores(0, SIZE))
    with pytest.raises(UsageError, match=r"not str: scores=l0prune\.score\(model"):
        fit(model, "params=0.5", "magnitude")


def test_those_of_lowest_score_close():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    l0prune.gate(model, torch.zeros(2, 4), include=["0"])
    scores = torch.tensor([5.0, 1, 7, 3, 2, 8, 4, 6])
    # A neuron costs 4 weights, a bias and 2 weights that read it: 7 of 58 parameters.
    assert fit(model, "params=23", scores) == {"params=23": 23}
    assert l0prune.gates(model).open().tolist() == [s > 5 for s in scores.tolist()]


def test_where_there_is_room_the_best_open_again():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    l0prune.gate(model, torch.zeros(2, 4), include=["0"])
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([3.0, -9, -4, -5, -6, -7, -8, -3]))
    assert fit(model, "params=23") == {"params=23": 23}
    assert gates.open().tolist() == [True, False, True, False, False, False, False, True]
    with torch.no_grad():
        gates.log_alpha[gates.log_alpha < 2] = -9
    assert fit(model, "params=23", fill=False) == {"params=23": 9}


def test_room_is_filled_past_what_does_not_fit_and_what_changes_nothing():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 12), nn.ReLU(), nn.Linear(12, 2)
    )
    l0prune.gate(model, torch.zeros(2, 1, 8, 8))
    gates = l0prune.gates(model)
    scores = {
        # The first two maps are open; the third, with its inputs, is more than there is room for.
        "0": torch.tensor([9.0, 9, 3, 0, 0, 0, 0, 0]),
        # The inputs of the other five change nothing while their maps are closed.
        "2.in": torch.cat([torch.full((3 * 36,), 8.0), torch.full((5 * 36,), 2.0)]),
        "2": torch.tensor([9.0] * 3 + [1.0] * 9),
    }
    with torch.no_grad():
        gates.log_alpha.copy_(torch.cat([scores[axis.name] for axis in gates.plan.axes]) - 5)
    # Two maps, 72 inputs of four neurons, two answers; with three neurons it would be 75 less.
    params = 2 * 10 + 4 * 73 + 2 * 5
    assert fit(model, f"params={params}") == {f"params={params}": params}
    assert [int(axis.open.sum()) for axis in gates.axes if axis.name != "2.in"] == [2, 4]


def test_gates_that_stand_right_are_left_alone():
    scores = random_scores(3, SIZE)
    model = gated(scores)
    gates = l0prune.gates(model)
    before = gates.open()
    fit(model, "params=0.5")
    same = gates.open() == before
    assert not same.all()
    assert torch.equal(gates.log_alpha[same], scores[same])


def test_several_budgets_are_all_met():
    model = gated(random_scores(1, SIZE) + 3)
    counts = fit(model, "macs=0.6, params=0.5, inner: params=0.3")
    cost = CostModel(l0prune.gates(model).plan)
    inner = frozenset([l0prune.gates(model).plan.names.index("inner")])
    assert counts["macs=0.6"] <= 0.6 * cost.dense("macs")
    assert counts["params=0.5"] <= 0.5 * cost.dense("params")
    through = 9 * 16 * 24 + 24 + 24 * 16  # what slots of `inner` can take away
    assert cost.dense("params", inner) == through
    assert counts["inner: params=0.3"] <= 0.3 * through


def test_a_budget_for_one_axis_closes_no_other():
    model = gated(random_scores(1, SIZE).abs() + 3)
    fit(model, "inner: params=0.5")
    others = [axis for axis in l0prune.gates(model).axes if axis.name != "inner"]
    assert all(axis.open.all() for axis in others)


def layers() -> nn.Module:
    """Three widths that are read one by the next."""
    sizes, modules = (3, 7, 12, 29, 4), []
    for before, after in pairwise(sizes):
        modules += [nn.Conv2d(before, after, 1), nn.ReLU()]
    return l0prune.gate(nn.Sequential(*modules[:-1]).eval(), torch.randn(2, 3, 2, 2))


@pytest.mark.parametrize(
    ("budget", "widths"),
    [
        ("0: width=0.5, 2: width=0.5, 4: width=0.5", {"0": 3, "2": 6, "4": 14}),
        ("*: width=0.29", {"0": 2, "2": 3, "4": 8}),
        ("[24]: width=5", {"2": 5, "4": 5}),
        ("width=0.01", {"0": 1, "2": 1, "4": 1}),
        ("[0-9]: width=0.5, 4: width=2, 2: width=0.9", {"0": 3, "2": 6, "4": 2}),
    ],
)
@pytest.mark.parametrize("before", [None, "params=0.1"])
@pytest.mark.one_in(10)
def test_each_axis_keeps_its_share_of_slots(budget, widths, before):
    """Also those of an axis that has fewer before: there is room for as many as it may have."""
    torch.manual_seed(1)
    model = layers()
    scores = torch.rand(l0prune.gates(model).plan.size)
    if before is not None:
        fit(model, before, scores)
    untouched = {axis.name: axis.open for axis in l0prune.gates(model).axes}
    counts = fit(model, budget, scores)
    assert {text.partition(":")[0]: count for text, count in counts.items()} == widths
    for axis in l0prune.gates(model).axes:
        best = scores[axis.slice].argsort(descending=True)[: widths.get(axis.name)]
        expected = torch.zeros(axis.size, dtype=torch.bool).index_fill(0, best, True)
        assert torch.equal(axis.open, expected if axis.name in widths else untouched[axis.name])


def test_widths_and_another_budget_are_met_together():
    model = layers()
    counts = fit(model, "4: width=0.3, macs=0.3", l0prune.score(model, "magnitude"))
    small = l0prune.export(model)
    assert counts["4: width=0.3"] <= 8
    assert small.macs == counts["macs=0.3"] <= 0.3 * small.macs_before


def test_a_branch_has_no_width():
    model = l0prune.gate(with_branches.Net().eval(), with_branches.X, branches=True)
    kinds = {axis.name: axis.kind for axis in l0prune.gates(model).axes}
    counts = fit(model, "width=0.5", l0prune.score(model, "magnitude"))
    assert "branch" in kinds.values()
    assert {kinds[text.partition(":")[0]] for text in counts} == set(kinds.values()) - {"branch"}
    (branch, *_) = (name for name, kind in kinds.items() if kind == "branch")
    with pytest.raises(UsageError, match="no axis that is gated there has slots"):
        fit(model, f"{branch}: width=0.5")


def test_widths_alone_are_rounded_up():
    scores = random_scores(5, SIZE)
    model = gated(scores)
    before = {axis.name: int(axis.open.sum()) for axis in l0prune.gates(model).axes}
    assert fit(model, round_to=8) == {}
    after = {axis.name: axis for axis in l0prune.gates(model).axes}
    for name, count in before.items():
        if after[name].kind == "channel":
            assert int(after[name].open.sum()) == min(after[name].size, 8 * -(-count // 8))


def test_what_cannot_be_met_names_what_is_in_the_way():
    model = gated()
    with pytest.raises(UsageError, match=r"head .*pinned.*output") as caught:
        fit(model, "params=0.001")
    assert "with every gate closed that may be" in str(caught.value)
    assert bool((l0prune.gates(model).log_alpha > 2).all())  # nothing was touched


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"budget": "nowhere: params=0.5"}, "nowhere"),
        ({"budget": "params=0.5", "scores": torch.zeros(3)}, "one per gate"),
        ({"budget": "params=0.5", "scores": torch.full((SIZE,), float("nan"))}, "finite"),
        ({"budget": "params=0.5", "round_to": 0}, "round_to"),
        ({"budget": "params=0.5", "round_to": 1.5}, "round_to"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, why):
    with pytest.raises(UsageError, match=why):
        fit(gated(), **arguments)


def test_a_budget_that_leaves_almost_nothing_is_said():
    """With k units in each layer 20k + k² + 5k of 12,500 MACs: 2 for 62 of them, 10 for 0.028."""
    layers = nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 5)
    model = l0prune.gate(nn.Sequential(*layers), torch.zeros(2, 20), include=["0", "2"])
    scores = torch.rand(200)
    said = "macs=0.005 leaves.* 2 of 100 in 0, 2 of 100 in 2. A tenth .* would be macs=0.028$"
    with pytest.warns(L0pruneWarning, match=said):
        fit(model, "macs=0.005", scores)
    with pytest.warns(L0pruneWarning, match=said):
        l0prune.Budget(model, "macs=0.005", steps=10)
    fit(model, "macs=0.05", scores)  # without a warning


@pytest.mark.parametrize("budgets", [("params=37", "params=23"), ("width=5", "width=3")])
def test_gates_that_have_not_learned_are_ranked_by_magnitude(budgets):
    """Also once a first cut has closed some: those left differ by chance alone."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    norms = torch.tensor([5.0, 1, 7, 3, 2, 8, 4, 6])
    with torch.no_grad():
        model[2].weight.copy_(norms.expand(2, 8))
    l0prune.gate(model, torch.zeros(2, 4), include=["0"])
    assert fit(model, "params=1") == {"params=1": 58}  # without a warning: nothing closes
    for budget, least in zip((*budgets, budgets[0]), (3, 5, 3), strict=True):
        with pytest.warns(L0pruneWarning, match="'magnitude'"):
            fit(model, budget)
        assert torch.equal(l0prune.gates(model).open(), norms > least)
