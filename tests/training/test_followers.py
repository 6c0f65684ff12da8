"""An average of the user's own ends with the gates of the model, and no other copy does."""

from __future__ import annotations

import copy

import pytest
import torch
from small_task import clouds, gated
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import l0prune
from l0prune.errors import L0pruneWarning

STEPS = 60
EXCEEDS = "exceed the budget of the run"


def ema(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    return average, lambda step: average.update_parameters(model)


def swa(model):
    average = AveragedModel(model)
    return average, lambda step: average.update_parameters(model) if step % 5 == 0 else None


def by_hand(model):
    """As detectors and timm do it, in a copy in eval mode, and not in each step."""
    average = copy.deepcopy(model).eval().requires_grad_(False)

    def update(step):
        if step % 3 == 0:
            now = model.state_dict()
            for name, value in average.state_dict().items():
                if value.is_floating_point():
                    value.mul_(0.99).add_(now[name], alpha=0.01)

    return average, update


def untouched(model):
    return copy.deepcopy(model), lambda step: None


def synced(model):
    """The best state so far, as it was."""
    kept = copy.deepcopy(model)
    return kept, lambda step: kept.load_state_dict(model.state_dict()) if step < 9 else None


def trained(model):
    other = copy.deepcopy(model)
    pruner = l0prune.Pruner(other, lam=0.1, steps=10 * STEPS, say=print)
    optimizer = torch.optim.Adam(pruner.param_groups())
    return other, lambda step: one_step(other, pruner, optimizer)


def one_step(model, pruner, optimizer):
    data = clouds()
    nn.functional.cross_entropy(model(data.inputs), data.targets).backward()
    pruner.before_step(optimizer)
    optimizer.step()
    pruner.after_step()
    optimizer.zero_grad()


def run(make):
    """The model, its copy, and what gates the copy had just before those of the model stood."""
    torch.manual_seed(0)
    model = gated().train()
    pruner = l0prune.Pruner(model, budget="params=0.4", steps=STEPS, gate_lr=0.3, say=print)
    optimizer = torch.optim.Adam(pruner.param_groups(lr=1e-2))
    other, update = make(model)
    before = None
    for step in range(STEPS):
        if step == pruner.phases.learning - 1:
            before = l0prune.gates(other).log_alpha.detach().clone()
        one_step(model, pruner, optimizer)
        if step == pruner.phases.learning - 1:
            after = l0prune.gates(other).log_alpha.detach().clone()
        update(step)
    return model, other, torch.equal(before, after)


@pytest.mark.parametrize("make", [ema, swa, by_hand])
@pytest.mark.one_in(3)
def test_an_average_meets_the_budget_of_the_model(make):
    model, average, _ = run(make)
    ours, theirs = l0prune.export(model), l0prune.export(average)
    assert theirs.params <= 0.4 * theirs.params_before
    assert torch.equal(ours.kept, theirs.kept)
    mine, other = ours.module.state_dict(), theirs.module.state_dict()
    assert any(not torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("make", [untouched, synced, trained])
@pytest.mark.one_in(3)
def test_other_copies_are_left_alone(make):
    _, _, stayed = run(make)
    assert stayed


def uneven(model):
    """An average with a factor of its own for each number."""
    average = copy.deepcopy(model).eval().requires_grad_(False)

    def update(step):
        for value, now in zip(average.parameters(), model.parameters(), strict=True):
            value.lerp_(now.detach(), torch.rand_like(value) * 0.02)

    return average, update


def test_an_average_that_is_not_recognised_is_named_where_it_exceeds_the_budget():
    model, average, _ = run(uneven)
    with pytest.warns(L0pruneWarning, match=rf"{EXCEEDS}.*an export has \d+% for params=0.4"):
        small = l0prune.export(average)
    assert small.params > 0.4 * small.params_before
    l0prune.gates(average).set_open(l0prune.gates(model).open())
    assert l0prune.export(average).params <= 0.4 * small.params_before
    l0prune.export(model)


def test_an_average_that_is_loaded_into_the_model_is_named_too():
    state = {}

    def by_state(model):
        state.update({name: value.clone() for name, value in model.state_dict().items()})
        other = copy.deepcopy(model)

        def update(step):
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    state[name].lerp_(value, 0.01)

        return other, update

    model, untouched_copy, _ = run(by_state)
    l0prune.export(model)
    l0prune.export(untouched_copy)
    gates = state.pop("l0prune_gates.log_alpha")
    model.load_state_dict(state, strict=False)
    l0prune.export(model)
    model.load_state_dict({**state, "l0prune_gates.log_alpha": gates})
    with pytest.warns(L0pruneWarning, match=EXCEEDS):
        l0prune.export(model)


def test_a_copy_with_a_run_of_its_own_answers_to_that_alone():
    _, other, _ = run(trained)
    l0prune.export(other)
