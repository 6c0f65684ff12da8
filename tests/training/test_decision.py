"""Branches are decided before widths are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import data, floats, integers, lists
from residual import Residual
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.training.start import likeliest

X = torch.zeros(2, 3, 8, 8)
STEPS = 40


def run(model: nn.Module, steps: int, **settings):
    """A loop of one's own, with noise for data; after each step the switch's P(z ≠ 0)."""
    settings |= {"steps": STEPS, "warmup": 0, "settle": 10}
    pruner = l0prune.Pruner(model, **settings, say=lambda text: None)  # gates that hardly move
    optimizer = torch.optim.Adam(pruner.param_groups(lr=1e-3))
    (switch,) = (axis for axis in pruner.gates.plan.axes if axis.kind == "branch")
    seen = []
    torch.manual_seed(0)
    for _ in range(steps):
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
        seen.append(float(pruner.gates.open_probability()[switch.start].detach()))
    return pruner, seen


def gated(probability: float) -> nn.Module:
    torch.manual_seed(0)
    (name,) = (branch.name for branch in l0prune.survey(Residual().eval(), X).branches)
    start = {name: probability, "*": 0.9}
    return l0prune.gate(Residual(), X, branches=True, open_probability=start, jitter=0.0)


@pytest.mark.parametrize(("probability", "stays"), [(0.45, False), (0.8, True)])
@pytest.mark.one_in(2)
def test_from_then_on_a_branch_stays_or_is_gone(probability, stays):
    model = gated(probability)
    _, seen = run(model, 30, branch_freeze_fraction=0.5, budget="params=0.9", gate_lr=0.01)
    first = 15  # of 30 steps in which gates learn
    assert 0.01 < seen[first - 2] < 0.99
    wanted = 0.999 if stays else 0.001
    assert seen[first - 1 :] == pytest.approx([wanted] * (30 - first + 1), abs=1e-6)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.one_in(2)
def test_with_decide_0_a_branch_stays_as_it_is(stays):
    model = gated(0.45)  # open in eval mode, though its chance is below a half
    gates = l0prune.gates(model)
    (switch,) = (axis for axis in gates.plan.axes if axis.kind == "branch")
    if not stays:
        gates.set_open(gates.open().index_fill(0, torch.tensor([switch.start]), False))
    _, seen = run(model, 5, branch_freeze_fraction=0, budget="params=0.9", gate_lr=0.01)
    assert seen == pytest.approx([0.999 if stays else 0.001] * 5, abs=1e-6)


def test_a_run_that_goes_on_holds_branches_from_the_same_step_on():
    def pruner():
        settings = {"budget": "params=0.9", "steps": STEPS, "warmup": 0, "settle": 10}
        return l0prune.Pruner(gated(0.45), **settings, say=lambda text: None)

    first, second = pruner(), pruner()
    first.freeze_branches()
    second.load_state_dict(first.state_dict())
    second.advance()
    (switch,) = (axis for axis in second.gates.plan.axes if axis.kind == "branch")
    p = second.gates.open_probability().detach()[switch.start]
    assert min(float(p), 1 - float(p)) == pytest.approx(0.001, abs=1e-6)


def test_widths_go_on_learning():
    model = gated(0.45)
    gates = l0prune.gates(model)
    run(model, 16, branch_freeze_fraction=0.5, budget="params=0.9", gate_lr=0.01)
    before = gates.log_alpha.detach().clone()
    run(model, 5, branch_freeze_fraction=0.01, budget="params=0.9", gate_lr=0.01)
    moved = gates.log_alpha.detach() != before
    (switch,) = (axis for axis in gates.plan.axes if axis.kind == "branch")
    assert not moved[switch.start]
    assert bool(moved.any())


def test_under_a_price_branches_wait_for_the_widths():
    model = gated(0.8)
    gates = l0prune.gates(model)
    before = gates.log_alpha.detach().clone()
    _, seen = run(model, STEPS, lam=0.1, gate_lr=0.1)
    waits, learns = 15, 30  # it is 30 steps in which gates learn
    assert seen[:waits] == pytest.approx([0.8] * waits, abs=1e-6)
    assert len(set(seen[waits : learns - 1])) == learns - 1 - waits
    assert seen[learns - 1] == pytest.approx(0.999 if seen[learns - 2] >= 0.5 else 0.001, abs=1e-6)
    assert bool((gates.log_alpha.detach() != before).all())  # those of widths learn as well


def test_branches_alone_wait_for_nothing():
    model = l0prune.gate(Residual(), X, branches=True, exclude="*", open_probability=0.8)
    _, seen = run(model, 5, lam=0.1, gate_lr=0.1)
    assert len(set(seen)) == 5


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.one_in(2)
def test_an_optimizer_does_not_leap_when_branches_have_waited(kind):
    """It has seen their gradients all the while: their first step is as long as the others'."""
    model = gated(0.8)
    pruner = l0prune.Pruner(model, steps=200, warmup=0, settle=0, lam=0.0, say=print)
    gates = pruner.gates
    (switch,) = (axis.start for axis in gates.plan.axes if axis.kind == "branch")
    optimizer = kind([{"params": [gates.log_alpha], "lr": 0.01}])
    moved = []
    for _ in range(110):
        before = gates.log_alpha.detach().clone()
        gates.log_alpha.grad = torch.ones_like(gates.log_alpha)
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        moved.append(before - gates.log_alpha.detach())
    assert not any(bool(each[switch]) for each in moved[:100])
    assert float(moved[100][switch]) == pytest.approx(0.01, rel=1e-4)


@dataclass
class Weighed:
    """A budget about the sum of some amounts, each times the chance that it is there."""

    amounts: torch.Tensor
    target: float

    def share_of_targets(self, p: torch.Tensor) -> torch.Tensor:
        return (self.amounts * p).sum()[None] / self.target


@given(data())
def test_as_many_of_the_likeliest_stay_as_change_least_what_is_expected(data):
    count = data.draw(integers(1, 8))
    p = torch.tensor(data.draw(lists(floats(0, 1), min_size=count, max_size=count)))
    p = torch.cat([torch.tensor([0.5, 0.7]), p]).double()
    amounts = torch.tensor(data.draw(lists(floats(0.1, 9), min_size=len(p), max_size=len(p))))
    budget = Weighed(amounts.double(), data.draw(floats(0.1, 20)))
    switches = torch.arange(2, len(p))
    stays = likeliest(p, switches, budget)

    def change(stay: torch.Tensor) -> float:
        decided = p.clone()
        decided[2:] = stay.double()
        return abs(float(budget.share_of_targets(decided) / budget.share_of_targets(p)) - 1)

    if stays.any() and not stays.all():
        assert p[2:][stays].min() >= p[2:][~stays].max()
    order = p[2:].argsort(descending=True)
    choices = [torch.zeros(count, dtype=torch.bool) for _ in range(count + 1)]
    for number, choice in enumerate(choices):
        choice[order[:number]] = True
    assert change(stays) == pytest.approx(min(map(change, choices)), abs=1e-9)


def test_branches_that_are_half_there_do_not_go_all_at_once():
    p = torch.tensor([0.45, 0.4, 0.4, 0.4, 0.35])  # two of which are expected
    stays = likeliest(p, torch.arange(5), Weighed(torch.ones(5), 1.5))
    assert stays.tolist() == [True, True, False, False, False]


@pytest.mark.slow
def test_in_the_end_the_budget_is_met_without_the_branch():
    model = gated(0.45)
    run(model, STEPS, budget="params=0.6", branch_freeze_fraction=0.3)
    small = l0prune.export(model)
    assert small.gone
    assert small.params <= 0.6 * small.params_before


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "half"])
@pytest.mark.one_in(3)
def test_a_part_that_makes_no_sense(fraction):
    with pytest.raises(UsageError, match="branch_freeze_fraction"):
        l0prune.Pruner(gated(0.5), steps=10, branch_freeze_fraction=fraction)


def test_in_a_loop_of_your_own_branches_stand_from_the_first_step_on():
    model = gated(0.45)
    settings = {"budget": "params=0.9", "steps": STEPS, "warmup": 0, "settle": 10}
    pruner = l0prune.Pruner(model, **settings, say=lambda text: None)
    pruner.freeze_branches()
    (switch,) = (axis for axis in pruner.gates.plan.axes if axis.kind == "branch")
    p = pruner.gates.open_probability().detach()[switch.start]
    assert float(p) == pytest.approx(0.999, abs=1e-6)
