"""Penalties on single weights: single steps, whole runs, zeros that stay, and what is refused."""

import pytest
import torch
from small_task import FEATURES, data, differing, gated, stopped_at, tensors
from test_gsm import DECAY, MOMENTUM, RATE, batches, differentiated, mlp
from torch.nn.functional import softshrink

import l0prune
from l0prune.errors import UsageError
from l0prune.features.penalties.shrinkage import PENALTIES
from l0prune.gating.attaching import weights_of

NAMES = ("0.weight", "2.weight")


def steps(optimizer_of, count, **settings):
    """The weights before and after the penalty of the last step, and the optimizer's states."""
    model = l0prune.gate(mlp(), torch.randn(2, 4))
    pruner = l0prune.Pruner(model, steps=count + 2, warmup=0, settle=1, ramp=0, **settings)
    optimizer = optimizer_of(pruner.param_groups(lr=RATE, weight_decay=DECAY))
    for x in batches(count):
        model(x).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        before = tensors(model)
        pruner.after_step()
    parameters = weights_of(model)
    return before, tensors(model), {name: optimizer.state[parameters[name]] for name in NAMES}


def test_after_sgd_it_is_soft_thresholding():
    v, w, _ = steps(torch.optim.SGD, 2, penalty="group-lasso", lam=0.5, elements=1)
    for name in NAMES:
        torch.testing.assert_close(w[name], softshrink(v[name], 0.5 * RATE), rtol=1e-5, atol=1e-8)
        assert 0 < w[name].count_nonzero() < w[name].numel()
    assert torch.equal(v["0.bias"], w["0.bias"])


def test_after_adam_each_weight_has_its_own_threshold():
    v, w, states = steps(torch.optim.Adam, 3, penalty="group-lasso", lam=0.1, elements=1)
    for name in NAMES:
        second = states[name]["exp_avg_sq"] / (1 - 0.999**3)
        pull = 0.1 * RATE / (second.sqrt() + 1e-8)
        wanted = v[name].sign() * (v[name].abs() - pull).clamp(min=0)
        torch.testing.assert_close(w[name], wanted, rtol=1e-5, atol=1e-7)


def test_the_projection_of_a_price_is_hard_thresholding():
    start = mlp()
    v, w, _ = steps(torch.optim.SGD, 1, penalty="l0-projection", lam=1.0, elements=1)
    for name in NAMES:
        scale = start.get_parameter(name).square().mean().sqrt()
        stays = v[name].square() > 2 * RATE * scale
        assert torch.equal(w[name], v[name] * stays)


def test_global_sparse_momentum_is_the_formula():
    """A fifth of 35 weights, 7, have the gradient of the loss in each step."""
    w = {name: p.detach().double() for name, p in mlp().named_parameters()}
    z = {name: torch.zeros_like(p) for name, p in w.items()}
    for x in batches(9):
        w, g = differentiated(w, x)
        least = torch.cat([(w[n] * g[n]).abs().flatten() for n in NAMES]).sort().values[-7]
        g |= {n: g[n] * ((w[n] * g[n]).abs() >= least) for n in NAMES}
        z = {n: MOMENTUM * z[n] + DECAY * w[n] + g[n] for n in w}
        w = {n: w[n] - RATE * z[n] for n in w}

    def sgd(groups):
        return torch.optim.SGD(groups, momentum=MOMENTUM)

    _, found, _ = steps(sgd, 9, penalty="gsm", elements=0.2)
    for name, of in w.items():
        torch.testing.assert_close(found[name].double(), of, rtol=1e-5, atol=1e-6)


def tuned(model, **settings):
    own = {"penalty": "trimmed-l1", "elements": 0.3, "lr": 0.02, **settings}
    history = l0prune.finetune(
        model, data(), epochs=4, batch_size=40, progress=False, device="cpu", **own
    )
    return model, history


def count(model):
    weights = [p for n, p in model.named_parameters() if p.dim() > 1 and "l0prune" not in n]
    return sum(int(p.count_nonzero()) for p in weights)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.one_in(3)
def test_a_share_is_met_and_zeros_stay_zero(name):
    model, history = tuned(gated(), penalty=name, lr=0.05 if name == "gsm" else 0.02)
    total = 16 * (FEATURES + 3)
    assert count(model) == history.last["nonzero"]
    assert 0.2 * total < count(model) <= round(0.3 * total)
    small = l0prune.export(model)
    assert count(small.module) == count(model)
    assert l0prune.evaluate(small.module, data())["error"] < 0.15


def test_what_a_price_has_made_zero_stays_and_empty_slots_are_cut():
    model, history = tuned(gated(), elements=1, lam=0.1, penalty="group-lasso", ema=0.9)
    total = 16 * (FEATURES + 3)
    assert 0 < history.last["nonzero"] < total
    small = l0prune.export(model)
    widths = [layer.weight for layer in small.module if isinstance(layer, torch.nn.Linear)]
    assert widths[0].shape[0] < 16
    assert all(bool(column.any()) for column in widths[1].T)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path):
    whole, _ = tuned(gated(), out=tmp_path / "whole")
    for name, stops in (("learns", 9), ("settles", 20)):
        model = gated()
        with stopped_at(model, stops):
            tuned(model, out=tmp_path / name)
        model, _ = tuned(gated(), out=tmp_path / name, resume=True)
        assert differing(tensors(model), tensors(whole)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"elements": 0.1}, "there is none"),
        ({"penalty": "mcp", "elements": 1.0}, "needs a strength"),
        ({"optimizer": "gsm", "elements": 1.0}, "gsm has no price"),
        ({"penalty": "mcp", "elements": 0.1, "budget": "macs=0.5"}, "are of slots"),
        ({"penalty": "mcp", "elements": 0.1, "round_to": 8}, "are of slots"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(UsageError, match=words):
        l0prune.Settings.of(settings)


def test_what_cannot_be_is_refused_before_anything_is_changed():
    model = gated()
    before = tensors(model)
    with pytest.raises(UsageError, match="globs of λ are over axes"):
        l0prune.Pruner(model, steps=9, penalty="mcp", elements=1, lam={"*": 0.1})
    assert differing(tensors(model), before) == []
    gates = l0prune.gates(model)
    open_ = gates.open()
    open_[0] = False
    gates.set_open(open_)
    with pytest.raises(UsageError, match="slots of this one are closed"):
        l0prune.Pruner(model, steps=9, penalty="mcp", elements=0.1)
