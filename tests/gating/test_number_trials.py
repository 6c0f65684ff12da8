"""The gated forward is compared with its graph before training, with slots closed at random."""

import pytest
import torch
import torch.nn.functional as F
from networks import Fn
from small_networks import CASES
from torch import nn

import l0prune
from l0prune.gating.number_trials import NumberTrial, faults
from l0prune.infer.parts import inferred

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


def layers():
    torch.manual_seed(0)
    return {"a": nn.Linear(5, 8), "b": nn.Linear(8, 6), "c": nn.Linear(6, 2)}


def through_the_dict(m, x):
    """Reads one weight as no gate can see it."""
    y = m.b(m.a(x).relu()).relu()
    return m.c(y) + F.linear(y, m.c._parameters["weight"])


def divided(m, x):
    """Divides by what is zero once half of the slots are."""
    h = m.a(x).relu()
    return m.c(m.b(h).relu()) / (m.a.weight.square().sum(1) - m.a.bias * 0).prod()


def sound(m, x):
    return m.c(m.b(m.a(x).relu()).relu())


def pins(forward, dtype=torch.float32):
    model = Fn(forward, **layers()).to(dtype).eval()
    survey = l0prune.survey(model, X.to(dtype))
    found = {p.where: p.reason for p in survey.pins if p.reason.startswith("with slots of")}
    return {axis.name for axis in survey.plan.axes}, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.one_in(2)
def test_a_weight_that_no_gate_reaches_is_a_pin(dtype):
    names, found = pins(through_the_dict, dtype)
    assert names == {"a", "a.in"}
    assert set(found) == {"b.weight dim 0", "c.weight dim 1"}
    assert "slots of b closed, the forward computes something else" in found["b.weight dim 0"]


def test_what_is_divided_by_zero_is_a_pin():
    names, found = pins(divided)
    assert "b" in names
    assert "a" not in names or not found
    model = Fn(divided, **layers()).eval()
    l0prune.gate(model, X)
    l0prune.gates(model).log_alpha.data[::2] = -9.0
    assert model(X).isfinite().all()
    torch.testing.assert_close(l0prune.export(model).module(X), model(X))


def test_sound_networks_lose_nothing():
    names, found = pins(sound)
    assert names == {"a", "b", "a.in"}
    assert not found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(14)
def test_small_networks_are_tried_and_are_sound(name):
    model, inputs = CASES[name]()
    parts = inferred(model.eval(), inputs, None)
    if parts.plan.axes:
        trial = NumberTrial(model, parts)
        assert trial.fault(()) is None
        assert trial.fault(trial.plan.names) is None


def test_a_trial_leaves_the_model_as_it_was():
    model = Fn(sound, **layers()).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert faults(model, inferred(model, X, None)) == {}
    assert model.training
    assert type(model.a) is nn.Linear
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_differs_from_its_graph_with_all_gates_open_says_nothing_of_gates(monkeypatch):
    model = Fn(through_the_dict, **layers()).eval()
    parts = inferred(model, X, None)
    assert faults(model, parts)
    monkeypatch.setattr(NumberTrial, "_graph", lambda self, z: [torch.zeros(3, 2)])
    assert faults(model, parts) == {}


@pytest.mark.slow
def test_large_networks_and_random_ones_are_not_tried(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(NumberTrial, "__init__", fail)
    wide = nn.Sequential(nn.Linear(5, 9000), nn.ReLU(), nn.Linear(9000, 9000)).eval()
    assert faults(wide, inferred(wide, X, None)) == {}
    noisy = Fn(lambda m, x: m.b(m.a(x) * torch.rand_like(x[:, :1])), **layers()).eval()
    assert faults(noisy, inferred(noisy, X, None)) == {}
