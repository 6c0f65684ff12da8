import math

import pytest
import torch
from small_task import gated
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.training.optimizers import OwnOptimizer, Schedule, make_optimizers
from l0prune.training.penalty import param_groups
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("adam", [torch.optim.Adam]),
        ("adamw", [torch.optim.AdamW]),
        ("sgd", [torch.optim.SGD, torch.optim.Adam]),
    ],
)
def test_gates_have_a_rate_of_their_own_and_no_decay(name, kinds):
    model = gated()
    settings = Settings(optimizer=name, lr=0.25, gate_lr=0.5, weight_decay=0.125)
    groups = param_groups(model, settings.lr, settings.gate_lr, settings.weight_decay)
    optimizers = make_optimizers(settings, groups)
    assert [type(optimizer) for optimizer in optimizers] == kinds
    weights, gates = (group for optimizer in optimizers for group in optimizer.param_groups)
    assert (weights["lr"], weights["weight_decay"]) == (0.25, 0.125)
    assert (gates["lr"], gates["weight_decay"]) == (0.5, 0.0)
    assert gates["params"] == [l0prune.gates(model).log_alpha]
    assert weights.get("momentum", 0.9) == 0.9


def test_sgd_steps_as_its_formula_says():
    weight = nn.Parameter(torch.tensor([2.0]))
    groups = [{"params": [weight], "lr": 0.1, "weight_decay": 0.5}]
    (optimizer,) = make_optimizers(Settings(optimizer="sgd"), groups)
    for _ in range(2):
        (3 * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    one = 2 - 0.1 * (3 + 0.5 * 2)
    two = one - 0.1 * (0.9 * 4 + 3 + 0.5 * one)
    assert weight.item() == pytest.approx(two, rel=1e-6)


def test_a_function_makes_any_other_optimizer():
    def make(groups):
        return torch.optim.RMSprop(groups)

    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.1}]
    (optimizer,) = make_optimizers(Settings(optimizer=make), groups)
    assert type(optimizer) is torch.optim.RMSprop


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "several times in a step"),
        (lambda groups: None, "made a NoneType"),
    ],
)
def test_what_cannot_take_a_step_alone_is_refused(make, why):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.1}]
    with pytest.raises(UsageError, match=why):
        make_optimizers(Settings(optimizer=make), groups)


def test_a_frozen_model_is_refused():
    with pytest.raises(UsageError, match="frozen"):
        make_optimizers(Settings(), [])


def test_schedules_scale_the_rates_of_weights():
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [first], "lr": 1.0}, {"params": [second], "lr": 4.0}]

    def rates(schedule, step):
        settings = Settings(schedule=schedule)
        (optimizer,) = make_optimizers(settings, [dict(group) for group in groups])
        Schedule(settings, [optimizer], Phases(total=8, warmup=0, settle=4)).set(step)
        return [group["lr"] for group in optimizer.param_groups]

    assert rates("constant", 7) == [1, 4]
    assert rates("cosine", 0) == [1, 4]
    assert rates("cosine", 4) == pytest.approx([0.5, 2])
    assert rates("cosine", 2) == pytest.approx([f * (2 + math.sqrt(2)) / 4 for f in (1, 4)])
    assert rates(lambda done: 1 - done, 2) == [0.75, 3]
    assert rates("settle", 4) == [1, 4]
    assert rates("settle", 6) == pytest.approx([0.5, 2])
    assert rates("settle", 7) == pytest.approx([f * (2 - math.sqrt(2)) / 4 for f in (1, 4)])
    assert [rates("step", step)[0] for step in (3, 4, 5, 6, 7)] == pytest.approx(
        [1, 0.1, 0.1, 0.01, 0.01]
    )


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_rate_of_gates_stays(name):
    model = gated()
    settings = Settings(optimizer=name, schedule="cosine", lr=0.25, gate_lr=0.5)
    groups = param_groups(model, settings.lr, settings.gate_lr)
    optimizers = make_optimizers(settings, groups)
    Schedule(settings, optimizers, Phases(total=8, warmup=0, settle=4)).set(4)
    rates = {g["name"]: g["lr"] for each in optimizers for g in each.param_groups}
    assert rates == {"weights": pytest.approx(0.125), "gates": 0.5}


@pytest.mark.parametrize("name", ["settle", "constant"])
def test_without_settling_rates_stay(name):
    weight = nn.Parameter(torch.ones(1))
    settings = Settings(schedule=name)
    (optimizer,) = make_optimizers(settings, [{"params": [weight], "lr": 0.5}])
    Schedule(settings, [optimizer], Phases.dense(epochs=2, steps_per_epoch=4)).set(7)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_overflowed_moves_no_gate_and_is_not_remembered(fused, monkeypatch):
    monkeypatch.setattr("l0prune.training.optimizers._can_fuse", lambda _: fused)

    def after(*gradients):
        gates = nn.Parameter(torch.tensor([1.0, 2.0]))
        own = OwnOptimizer([gates], lr=0.1)
        for gradient in gradients:
            own.put_aside(id(gates), torch.tensor(gradient))
            own.hand_over()
            own.step(scale=torch.tensor(8.0))
        return gates.detach()

    first, second = [8.0, -3.0], [1.0, 5.0]
    found = after([math.inf, 0.0], first, [math.nan, 1.0], second)
    assert torch.equal(found, after(first, second))
    assert not torch.equal(found, torch.tensor([1.0, 2.0]))
