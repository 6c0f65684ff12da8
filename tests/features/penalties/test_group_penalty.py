"""Penalties on groups: the operator in Adam's metric, single steps, and whole runs."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from small_task import FEATURES, data, differing, gated, stopped_at, tensors
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.penalties.groups import _in_metric
from l0prune.features.penalties.shrinkage import PENALTIES
from l0prune.features.penalties.slot_groups import Groups, Metric, squares
from l0prune.gating.attaching import bypass


def mlp(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    return l0prune.gate(model, torch.randn(2, 4), exclude="*.in", **settings)


def steps(model, optimizer_of, count=1, **settings):
    """A loop of one's own; the weights before the last penalty, and the pruner."""
    pruner = l0prune.Pruner(model, steps=count + 1, warmup=0, settle=1, **settings)
    optimizer = optimizer_of(pruner.param_groups(lr=0.1))
    generator = torch.Generator().manual_seed(1)
    before = {}
    for _ in range(count):
        model(torch.randn(16, 4, generator=generator)).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        before = tensors(model)
        pruner.after_step()
    return before, optimizer


def hidden(state):
    """The group of each hidden neuron: its row, and its column of the next layer."""
    return torch.cat([state["0.weight"], state["2.weight"].T], 1).double()


def test_the_group_of_a_slot_is_what_it_writes_and_is_read_by():
    model = mlp()
    groups = Groups(model, l0prune.gates(model))
    assert groups.usable.all()
    assert groups.counts.tolist() == [7.0] * 5
    found = groups.sums(squares)
    torch.testing.assert_close(found.double(), hidden(tensors(model)).square().sum(1))


@pytest.mark.parametrize("lam", [0.02, 0.1])
def test_group_lasso_after_sgd_is_soft_thresholding_of_the_norm(lam):
    model = mlp()
    before, _ = steps(model, torch.optim.SGD, penalty="group-lasso", lam=lam)
    v, w = hidden(before), hidden(tensors(model))
    pull = 0.1 * lam * 7**0.5
    wanted = v * (1 - pull / v.norm(dim=1, keepdim=True)).clamp(min=0)
    torch.testing.assert_close(w, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(before["0.bias"], tensors(model)["0.bias"])


def test_group_lasso_after_adam_is_least_in_adams_metric():
    model = mlp()
    lam = 0.07
    before, adam = steps(model, torch.optim.Adam, penalty="group-lasso", lam=lam)
    stiff, parameters = {}, dict(model.named_parameters())
    for name in ("0.weight", "2.weight"):
        state = adam.state[parameters[name]]
        second = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
        stiff[name] = (second.sqrt() + 1e-8) / 0.1
    h, v, w = hidden(stiff).numpy(), hidden(before).numpy(), hidden(tensors(model)).numpy()
    assert 0 < (w == 0).all(1).sum() < 5
    for stiffness, start, found in zip(h, v, w, strict=True):

        def value(x, stiffness=stiffness, start=start):
            return 0.5 * (stiffness * (x - start) ** 2).sum() + lam * 7**0.5 * np.linalg.norm(x)

        tried = [minimize(value, start, tol=1e-12).fun, value(0 * start)]
        assert value(found) <= min(tried) + 1e-6


def test_the_operator_in_a_metric_that_is_the_same_for_all_is_the_plain_one():
    model = mlp()
    groups = Groups(model, l0prune.gates(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prices = torch.tensor([0.0, 0.1, 1.0, 2.0, 50.0])
    found = _in_metric(groups, prices, Metric([optimizer])).sizes
    norms = hidden(tensors(model)).norm(dim=1).float()
    wanted = (norms - 0.5 * prices).clamp(min=0)
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-5, atol=0)


def test_what_is_zero_is_closed_and_the_network_computes_the_same():
    model = mlp()
    steps(model, torch.optim.SGD, count=8, penalty="group-lasso", lam=0.5)
    gates = l0prune.gates(model)
    open_ = gates.open()
    assert 0 < open_.sum() < 5
    assert not hidden(tensors(model))[~open_].any()
    x = torch.randn(6, 4)
    gated_outputs = model.eval()(x)
    with bypass(model):
        assert torch.equal(model(x), gated_outputs)
    small = l0prune.export(model)
    assert small.module[0].weight.shape[0] == open_.sum()


def test_the_last_slot_of_an_axis_stays():
    model = mlp()
    steps(model, torch.optim.SGD, count=4, penalty="group-lasso", lam=50.0)
    assert l0prune.gates(model).open().sum() == 1


def test_frozen_weights_stay_and_their_slots_too():
    model = mlp()
    model[2].weight.requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to shrink"):
        l0prune.Pruner(model, steps=9, penalty="mcp", lam=0.1)


def tuned(model, **settings):
    l0prune.finetune(
        model, data(), epochs=4, batch_size=40, progress=False, device="cpu", **settings
    )
    return model


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.one_in(6)
def test_a_budget_is_met_by_closing_slots_in_training(name):
    model = tuned(gated(), penalty=name, budget="params=0.5", lr=1e-2)
    small = l0prune.export(model)
    assert 78 < small.params < 98  # of 195
    assert l0prune.evaluate(small.module, data())["error"] < 0.15


@pytest.mark.parametrize(
    ("name", "lam"), [("group-mcp", 0.05), ("trimmed-l1", 0.05), ("l0-projection", 1.0)]
)
@pytest.mark.one_in(3)
def test_a_price_closes_slots(name, lam):
    model = tuned(gated(), penalty=name, lam=lam, lr=1e-2)
    assert l0prune.export(model).params < 190


def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path):
    settings = {"penalty": "scad", "budget": "params=0.5", "lr": 1e-2}
    whole = tuned(gated(), out=tmp_path / "whole", **settings)
    model = gated()
    with stopped_at(model, 14):
        tuned(model, out=tmp_path, **settings)
    model = tuned(gated(), out=tmp_path, resume=True, **settings)
    assert differing(tensors(model), tensors(whole)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"penalty": "ridge", "lam": 1}, "no penalty 'ridge'"),
        ({"penalty": "mcp"}, "needs a strength"),
        ({"penalty": "mcp", "lam": 1, "prior": 0.1}, "prior is of gates that learn"),
        ({"penalty": "mcp", "lam": 1, "l2": 0.1}, "l2 is of gates that learn"),
        ({"penalty": "mcp", "lam": 1, "start": "fisher"}, "nor with a start from scores"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(UsageError, match=words):
        l0prune.Settings.of(settings)


def test_gates_that_have_learned_are_refused():
    model = mlp()
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.log_alpha[0] = 0.0
    with pytest.raises(UsageError, match="gates that have learned"):
        l0prune.Pruner(model, steps=9, penalty="mcp", lam=0.1)


def test_a_loop_has_to_give_its_optimizer():
    model = mlp()
    pruner = l0prune.Pruner(model, steps=9, penalty="mcp", lam=0.1, warmup=0)
    model(torch.randn(3, FEATURES - 2)).square().mean().backward()
    pruner.before_step()
    with pytest.raises(UsageError, match=r"pruner.before_step\(optimizer\)"):
        pruner.after_step()
    with pytest.raises(UsageError, match="leave start_from out"):
        pruner.start_from(data())
