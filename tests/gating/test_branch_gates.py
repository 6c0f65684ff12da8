"""Switches of branches: what they cost and save, how they are fitted, and how they learn."""

from __future__ import annotations

import itertools

import pytest
import torch
from differences import ROUNDED, difference
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.plan.cost import CostModel, cost_of
from l0prune.plan.switches import switches_of


class Nested(nn.Module):
    """Two branches in a row, of which the first has one in itself."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.up, self.inner, self.down = nn.Linear(8, 10), nn.Linear(10, 10), nn.Linear(10, 8)
        self.second = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8))

    def forward(self, x):
        x = self.stem(x)
        y = self.up(x).relu()
        x = x + self.down(y + self.inner(y))
        return self.head(x + self.second(x))


X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def gated(**kwargs):
    torch.manual_seed(0)
    return l0prune.gate(Nested().eval(), X[:2], branches=True, **kwargs)


def test_what_only_a_branch_needs_costs_what_it_did_times_its_probability():
    plan = l0prune.gates(gated()).plan
    model, switches = CostModel(plan), switches_of(plan).nonzero().flatten()
    p = torch.rand(plan.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for unit in ("params", "macs"):
        mean = 0.0
        for states in itertools.product((0.0, 1.0), repeat=len(switches)):
            fixed = p.clone()
            fixed[switches] = torch.tensor(states, dtype=torch.float64)
            chances = torch.where(fixed[switches] == 1, p[switches], 1 - p[switches])
            mean += float(chances.prod()) * float(model.expected(fixed, unit))
        assert float(model.expected(p, unit)) == pytest.approx(mean, rel=1e-12)


def test_a_branch_in_a_closed_branch_costs_nothing():
    gates = l0prune.gates(gated())
    numbers = {axis.name: axis.start for axis in gates.plan.axes if axis.kind == "branch"}
    assert set(numbers) == {"inner", "down", "second"}
    open_ = torch.ones(gates.plan.size, dtype=torch.bool)
    open_[numbers["down"]] = False
    left = cost_of(gates.plan).actual(open_, "params")
    kept = (Nested().stem, Nested().head, Nested().second)
    assert left == sum(p.numel() for module in kept for p in module.parameters())


@pytest.mark.parametrize("how", ["taylor", "fisher", "magnitude", "group-magnitude", "bn-scale"])
@pytest.mark.one_in(6)
def test_depth_by_a_score(how):
    """Only branches have gates: the classical cut of whole blocks."""
    model = gated(include=[])
    data = l0prune.Task([(X, torch.arange(12) % 3)])
    scores = l0prune.score(model, how, data)
    assert scores.shape == (3,)
    assert bool((scores > 0).all())
    l0prune.fit(model, "params=0.75", scores)
    gates = l0prune.gates(model)
    assert 0 < int(gates.open().sum()) < 3
    small = l0prune.export(model)
    assert small.params <= 0.75 * small.params_before
    assert difference(model, small, X) <= 1e-10


def test_only_what_takes_something_stands_in_the_way():
    """Not the branches that would be gone."""
    scores = torch.ones(l0prune.gates(model := gated(include=[])).plan.size)
    with pytest.raises(UsageError, match=r"Most of it is in stem \(56\), head \(27[^()]*\)\. Give"):
        l0prune.fit(model, "params=0.01", scores)


def test_ablation_takes_branches_out_in_rounds():
    """Of the k-th to go it is the k-th smallest of what the network does without a single one."""
    model, plain = gated(), Nested()
    plain.load_state_dict({n: v for n, v in model.state_dict().items() if "l0prune" not in n})
    data = l0prune.Task([(X[:5], torch.zeros(5).long()), (X[5:], torch.zeros(7).long())])
    found = l0prune.score(model, "ablation", data, normalise="none")
    first_order = l0prune.score(model, "outputs", data, normalise="none")
    with torch.no_grad():
        x = plain.stem(X)
        y = plain.up(x).relu()
        after = x + plain.down(y + plain.inner(y))
        whole = plain.head(after + plain.second(after))

        def without(*gone):
            after = x + ("down" not in gone) * plain.down(
                y + ("inner" not in gone) * plain.inner(y)
            )
            return plain.head(after + ("second" not in gone) * plain.second(after))

        def moved(*gone):
            return (whole - without(*gone)).square().sum(1).mean().item()

        torch.testing.assert_close(without(), whole)
    names = ["second", "down", "inner"]
    gone: list[str] = []
    while len(gone) < 3:
        rest = [name for name in names if name not in gone]
        gone.append(min(rest, key=lambda name: moved(*gone, name)))
    wanted = dict(zip(gone, sorted(map(moved, names)), strict=True))
    switches = switches_of(l0prune.gates(model).plan)
    torch.testing.assert_close(found[~switches], first_order[~switches])
    for axis in l0prune.gates(model).plan.axes:
        if axis.kind == "branch":
            assert float(found[axis.start]) == pytest.approx(wanted[axis.name], rel=1e-5)


class Either(nn.Module):
    """Of two branches one is enough to fill the stream, and a third adds a little."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.little = (nn.Linear(6, 6, bias=False) for _ in range(3))
        with torch.no_grad():
            for layer, factor in ((self.one, 9.0), (self.other, 9.0), (self.little, 0.1)):
                layer.weight.copy_(factor * torch.eye(6))

    def forward(self, x):
        return (x + self.one(x) + self.other(x)).clamp(max=4) + self.little(x)


def test_ablation_keeps_one_of_two_that_can_stand_in_for_each_other():
    x = torch.rand(12, 6, generator=torch.Generator().manual_seed(0)) + 1
    model = l0prune.gate(Either(), x[:2], include=[], branches=True)
    scores = l0prune.score(model, "ablation", l0prune.Task([(x, torch.zeros(12).long())]))
    names = [axis.name for axis in l0prune.gates(model).plan.axes]
    found = dict(zip(names, scores.tolist(), strict=True))
    assert found["one"] == found["little"] == 0 < found["other"]


def test_of_axes_of_other_kinds_nothing_opens_or_closes():
    model = gated()
    gates = l0prune.gates(model)
    before = gates.open().cpu()
    (wide,) = (axis for axis in gates.plan.axes if axis.name == "up")
    before[wide.start] = False
    gates.set_open(before)
    switches = switches_of(gates.plan)
    scores = torch.zeros(gates.plan.size)
    scores[switches] = torch.tensor([3.0, 2.0, 1.0])  # "second" goes, whatever the others are
    l0prune.fit(model, "params=0.75", scores, kinds="branch")
    after = {axis.name: axis.open.cpu() for axis in gates.axes}
    assert {name for name, open_ in after.items() if not open_.any()} == {"second"}
    assert after["up"].tolist() == before[wide.slice].tolist()
    small = l0prune.export(model)
    assert small.params <= 0.75 * small.params_before
    with pytest.raises(UsageError, match=r"of the kind 'layer'; there are branch, "):
        l0prune.fit(model, "params=0.5", kinds=("layer",))
    with pytest.raises(UsageError, match="cannot be met"):
        l0prune.fit(model, "params=0.01", kinds=["branch"])


def test_all_branches_may_go_and_no_more():
    model = gated(include=[])
    stays = sum(p.numel() for each in (model.stem, model.head) for p in each.parameters())
    whole = cost_of(l0prune.gates(model).plan).dense("params")
    l0prune.fit(model, f"params={stays}", l0prune.score(model, "magnitude"))
    small = l0prune.export(model)
    assert (small.params, {"down", "second"} - {*small.gone}) == (stays, set())
    with pytest.raises(UsageError, match="cannot be met"):
        l0prune.fit(model, f"params={stays - 1}")
    assert stays < whole


@pytest.mark.parametrize("compact", ["auto", "never"])
@pytest.mark.slow
def test_a_branch_that_adds_nothing_goes_first(compact):
    model = gated(include=[])
    with torch.no_grad():
        for layer in (model.second[2].weight, model.second[2].bias):
            layer.zero_()
    model.second.requires_grad_(False)
    targets = (X[:, 0] > 0).long()
    history = l0prune.finetune(
        model, [(X, targets)] * 4, epochs=40, budget="params=0.8", gate_lr=0.1, compact=compact,
        progress=False, device="cpu",
    )  # fmt: skip
    assert history.last["open"]["second"] == 0
    assert "second" not in history.last["dead"]
    small = l0prune.export(model)
    assert "second" in small.gone
    assert small.params <= 0.8 * small.params_before
    assert difference(model, small, X) <= ROUNDED
    assert [tuple(p.shape) for p in Nested().parameters()] == [
        tuple(p.shape) for name, p in model.named_parameters() if "l0prune" not in name
    ]


def test_what_only_closed_branches_need_is_as_narrow_as_can_be():
    """It costs nothing at any width, so that a fit would leave it whole."""
    model = gated()
    gates = l0prune.gates(model)
    scores = torch.rand(gates.plan.size, generator=torch.Generator().manual_seed(0)) + 1
    (switch,) = (axis for axis in gates.plan.axes if axis.name == "second")
    scores[switch.start] = 0
    l0prune.fit(model, "params=0.8", scores, kinds=sorted({axis.kind for axis in gates.axes}))
    left = {axis.name: int(axis.open.sum()) for axis in gates.axes}
    assert left["second"] == 0
    assert left["second.0"] == 1
    assert left["up"] > 1
    pruner = l0prune.Pruner(model, steps=10, lam=0.0, say=print)
    assert pruner.record()["dead"] == []
    said = pruner.doctor.after({**pruner.record(), "step": 1, "epoch": 1.0, "phase": "prune"})
    assert not [text for text in said.values() if "second.0" in text]


def test_every_branch_has_a_gate_unless_somebody_says_otherwise():
    def names(**kwargs):
        gates = l0prune.gates(l0prune.gate(Nested().eval(), X[:2], **kwargs))
        return {axis.name for axis in gates.axes if axis.kind == "branch"}

    branches = {"inner", "down", "second"}
    assert names() == names(branches=True) == branches
    assert names(branches=False) == names(keep_class="native") == set()
    assert names(include=["second*", "up"]) == {"second"}
    assert names(exclude=["second", "in*"]) == {"down"}
    assert names(include="up", branches=["down"]) == {"down"}
    assert names(exclude="*", branches=True) == branches
    with pytest.raises(UsageError, match=r"'sedond', which matches no axis or branch .*'second'"):
        names(exclude="sedond")
    with pytest.raises(UsageError, match="keep_class=True or False"):
        names(keep_class="native", branches=True)


def test_by_scores_branches_stay_unless_they_are_asked_for():
    model = gated()
    gates = l0prune.gates(model)
    scores = 1 + torch.rand(gates.plan.size, generator=torch.Generator().manual_seed(0))
    scores[switches_of(gates.plan)] = 0
    l0prune.fit(model, "params=0.5", scores)
    assert gates.open()[switches_of(gates.plan)].all()
    gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
    with torch.no_grad():  # by what they have learned they may go
        gates.log_alpha.copy_(5 * scores - 2)
    l0prune.fit(model, "params=0.5", fill=False)
    assert not gates.open()[switches_of(gates.plan)].all()
