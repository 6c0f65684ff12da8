"""A β that learns: its formulas and gradients, and its way through everything around the gates."""

import copy
import math

import pytest
import torch
from small_task import FEATURES, data, differing, gated, stopped_at, tensors
from torch import nn
from torch.utils.checkpoint import checkpoint

import l0prune
from l0prune.errors import FileError, UsageError
from l0prune.gating.kinds.base import gate_of

HardConcrete = l0prune.HardConcrete
SIZES = (2, 3)
BY = {"all": [0] * 5, "axis": [0, 0, 1, 1, 1], "slot": [0, 1, 2, 3, 4]}
every_way = pytest.mark.parametrize("by", BY)


def betas(gate, parameter):
    """Each β by plain floats."""
    spread = gate.beta_max - gate.beta_min
    return [gate.beta_min + spread / (1 + math.exp(-x)) for x in parameter.tolist()]


@every_way
def test_it_is_the_gate_of_each_beta(by):
    gate = HardConcrete(beta="learn", beta_by=by, estimator="median")
    index = gate.temperature_index(SIZES)
    assert index.tolist() == BY[by]
    start = gate.temperature_start(SIZES)
    assert betas(gate, start) == pytest.approx([2 / 3] * (max(BY[by]) + 1), rel=1e-6)
    parameter = torch.linspace(-2, 3, len(start), dtype=torch.float64)
    at = gate.at_temperature(parameter, index)
    log_alpha, u = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    prior = log_alpha.flip(0)
    for slot, number in enumerate(BY[by]):
        own = HardConcrete(betas(gate, parameter)[number], estimator="median")
        here = slice(slot, slot + 1)
        for found, wanted in [
            (at.sample(log_alpha, u), own.sample(log_alpha, u)),
            (at.estimate(log_alpha), own.estimate(log_alpha)),
            (at.open_probability(log_alpha), own.open_probability(log_alpha)),
            (at.divergence(log_alpha, prior), own.divergence(log_alpha, prior)),
            (at.shift_learned + at.initial(0.3), torch.full((5,), own.initial(0.3))),
        ]:
            torch.testing.assert_close(found[here].double(), wanted[here].double())


@every_way
def test_gradients_are_those_of_finite_differences_any_number_of_times(by):
    gate = HardConcrete(beta="learn", beta_by=by, estimator="median")
    index = gate.temperature_index(SIZES)
    torch.manual_seed(0)
    log_alpha = torch.randn(5, dtype=torch.float64).mul(0.3).requires_grad_()
    parameter = torch.randn(max(BY[by]) + 1, dtype=torch.float64).requires_grad_()
    u = torch.rand(5, dtype=torch.float64) * 0.4 + 0.3

    def values(parameter, log_alpha):
        at = gate.at_temperature(parameter, index)
        z, p = at.sample(log_alpha, u), at.open_probability(log_alpha)
        return z, p, at.estimate(log_alpha), at.divergence(log_alpha, log_alpha.flip(0))

    assert torch.autograd.gradcheck(values, (parameter, log_alpha))
    z = gate.at_temperature(parameter, index).sample(log_alpha, u)
    z[:2].sum().backward()
    z[2:].sum().backward()
    at_once = torch.autograd.grad(values(parameter, log_alpha)[0].sum(), parameter)[0]
    torch.testing.assert_close(parameter.grad, at_once)
    (mapped,) = torch.func.grad(lambda p: values(p, log_alpha)[0].sum())(parameter)[None]
    torch.testing.assert_close(mapped, at_once)


def linear(open_probability=0.6, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    kind = HardConcrete(beta="learn", **settings)
    return l0prune.gate(model, torch.randn(2, 4), gate=kind, open_probability=open_probability)


def test_expected_cost_follows_beta():
    model = linear(beta_by="axis")
    gates = l0prune.gates(model)
    assert gates.state_dict().keys() == {"log_alpha", "temperature"}
    names = [axis.name for axis in gates.axes]
    with torch.no_grad():
        gates.temperature.copy_(torch.tensor([-1.0, 2.0]))
    cost = l0prune.penalty(model, 1e-3)
    (slope,) = torch.autograd.grad(cost, gates.temperature)
    assert (slope > 0).all()  # a higher β is more often open, and costs more
    p = {}
    for name, axis, beta in zip(
        names, gates.axes, betas(gates.gate, gates.temperature), strict=True
    ):
        p[name] = HardConcrete(beta).open_probability(gates.log_alpha[axis.slice]).sum()
    hidden, inputs = (p[name].item() for name in names)
    by_hand = inputs * hidden + hidden + hidden * 2 + 2
    assert cost.item() == pytest.approx(1e-3 * by_hand, rel=1e-5)
    with_prior = l0prune.penalty(model, 0.0, n=1, prior=0.2)
    nats = 0.0
    for axis, beta in zip(gates.axes, betas(gates.gate, gates.temperature), strict=True):
        own = HardConcrete(beta)
        at = gates.log_alpha.detach()[axis.slice].double()
        nats += own.divergence(at, torch.full_like(at, own.initial(0.2))).sum().item()
    assert with_prior.item() == pytest.approx(nats, rel=1e-5)


def test_gates_are_opened_and_closed_by_hand_at_the_beta_that_was_learned():
    model = linear(beta_by="slot", estimator="median")
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.temperature.copy_(torch.linspace(-8, 8, 10))
    wanted = torch.arange(10) % 2 == 0
    gates.set_open(wanted)
    assert torch.equal(gates.open(), wanted)
    gates.set_open(~wanted)
    assert torch.equal(gates.open(), ~wanted)
    found = gates.initial(torch.full((10,), 0.3))
    p = gates.gate_now.open_probability(found)
    torch.testing.assert_close(p, torch.full_like(p, 0.3), rtol=1e-5, atol=0)


def test_optimizers_hold_it_with_the_gates_and_checkpointing_finds_its_gradient():
    model = linear(0.9)
    gates = l0prune.gates(model)
    groups = {group["name"]: group["params"] for group in l0prune.param_groups(model)}
    assert [*map(id, groups["gates"])] == [id(gates.log_alpha), id(gates.temperature)]
    assert len(groups["weights"]) == 4
    found = []
    for in_parts in (False, True):
        torch.manual_seed(3)
        model.train()
        x, again = torch.randn(8, 4), copy.deepcopy(model)
        if in_parts:
            first, rest = again[:2], again[2]
            again.forward = lambda x, f=first, r=rest: r(checkpoint(f, x, use_reentrant=True))
        again(x.requires_grad_()).square().sum().backward()
        found.append(l0prune.gates(again).temperature.grad)
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found)


def learned(model, **settings):
    l0prune.finetune(
        model, data(), epochs=4, batch_size=40, gate_lr=0.2, progress=False, device="cpu",
        **settings
    )  # fmt: skip
    return model


def axis_by_axis():
    return gated(HardConcrete(beta="learn", beta_by="axis"))


def test_it_learns_and_is_cut_saved_and_loaded(tmp_path):
    start = l0prune.gates(axis_by_axis()).temperature.detach()
    model = learned(axis_by_axis(), budget="params=0.5")
    gates = l0prune.gates(model)
    assert (gates.temperature - start).abs().min() > 0.05
    small = l0prune.export(model)
    assert 80 < small.params < 98  # of 195
    l0prune.save(model, tmp_path / "model.pt")
    again = l0prune.load(tmp_path / "model.pt")
    assert differing(tensors(model), tensors(again)) == []
    assert l0prune.gates(again).gate == gates.gate
    x = torch.randn(5, FEATURES)
    assert torch.equal(model.eval()(x), again.eval()(x))


def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path):
    settings = {"budget": "params=0.5", "compact": "never"}
    whole = learned(axis_by_axis(), out=tmp_path / "whole", **settings)
    model = axis_by_axis()
    with stopped_at(model, 12):
        learned(model, out=tmp_path, **settings)
    model = learned(axis_by_axis(), out=tmp_path, resume=True, **settings)
    assert differing(tensors(model), tensors(whole)) == []


def test_in_a_loop_of_ones_own_its_gradient_is_put_aside_and_its_state_is_kept():
    model = linear(0.9)
    pruner = l0prune.Pruner(model, budget="params=0.6", steps=20)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05))
    gates = l0prune.gates(model)
    start = gates.temperature.item()
    for _ in range(4):
        model(torch.randn(64, 4)).square().mean().backward()
        assert not gates.temperature.grad.any()
        pruner.before_step(optimizer)
        assert gates.temperature.grad is None
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
    assert abs(gates.temperature.item() - start) > 0.05
    state = pruner.state_dict()
    assert len(state["own"]["state"]) == 2
    again = l0prune.Pruner(copy.deepcopy(model), budget="params=0.6", steps=20)
    again.load_state_dict(state)
    assert again.state_dict()["own"]["state"][1].keys() == state["own"]["state"][1].keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": "learns"}, "does not take|'learn'"),
        ({"beta": "learn", "beta_by": "layer"}, "'all', 'axis' or 'slot'"),
        ({"beta": "learn", "beta_min": 0.7}, "bounds lie around"),
        ({"beta": "learn", "beta_max": 0.5}, "bounds lie around"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(UsageError, match=words):
        gate_of("hard-concrete", settings)


def test_a_file_with_a_temperature_of_another_kind_is_refused(tmp_path):
    model = linear()
    l0prune.gates(model).gate = HardConcrete()
    l0prune.save(model, tmp_path / "model.pt")
    with pytest.raises(FileError, match="temperature"):
        l0prune.load(tmp_path / "model.pt")
