"""Global sparse momentum: against a loop written by hand, in whole runs, and what is refused."""

import copy
import math

import pytest
import torch
from small_task import data, differing, gated, network, stopped_at, tensors
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.penalties.gsm import gsm_defaults

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.02


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=generator) for _ in range(count)]


def differentiated(w, x):
    """The parameters of ``mlp``, and the gradient of each: the loss is the mean square output."""
    w = {name: p.detach().requires_grad_() for name, p in w.items()}
    hidden = torch.relu(x.double() @ w["0.weight"].T + w["0.bias"])
    loss = (hidden @ w["2.weight"].T + w["2.bias"]).square().mean()
    g = torch.autograd.grad(loss, list(w.values()))
    return {name: p.detach() for name, p in w.items()}, dict(zip(w, g, strict=True))


def by_hand(model, count, active):
    """The parameters after so many steps, the loss reaching so many hidden neurons in each."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    z = {name: torch.zeros_like(p) for name, p in w.items()}
    seen = set()
    for x in batches(count):
        w, g = differentiated(w, x)
        first, last = ((w[n] * g[n]).abs() for n in ("0.weight", "2.weight"))
        best = (first.sum(1) + last.sum(0)).topk(active).indices
        seen.add(tuple(sorted(best.tolist())))
        b = torch.zeros(5, dtype=torch.float64)
        b[best] = 1
        g["0.weight"], g["2.weight"] = g["0.weight"] * b[:, None], g["2.weight"] * b
        z = {n: MOMENTUM * z[n] + DECAY * w[n] + g[n] for n in w}
        w = {n: w[n] - RATE * z[n] for n in w}
    assert len(seen) > 1  # others may come back
    return w


def test_it_is_the_formula():
    """42 % of 43 parameters, 8 for each hidden neuron and 3 of others, are two neurons."""
    model = mlp()
    wanted = by_hand(copy.deepcopy(model), 12, active=2)
    l0prune.gate(model, torch.randn(2, 4), exclude="*.in")
    pruner = l0prune.Pruner(
        model, steps=13, settle=1, penalty="gsm", budget="params=0.45", ramp=0, compact="never"
    )
    groups = pruner.param_groups(lr=RATE, weight_decay=DECAY)
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM)
    for x in batches(12):
        model(x).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found = tensors(model)
        pruner.after_step()
    for name, of in wanted.items():
        torch.testing.assert_close(found[name].double(), of, rtol=1e-5, atol=1e-6)
    assert l0prune.gates(model).open().sum() == 2


def tuned(model, **settings):
    own = {"optimizer": "gsm", "budget": "params=0.5", "lr": 0.05, "epochs": 4, **settings}
    l0prune.finetune(model, data(), batch_size=40, progress=False, device="cpu", **own)
    return model


def decayed():
    """A gated network, four of whose sixteen neurons have decayed."""
    model = gated()
    with torch.no_grad():
        model[0].weight[5:9] *= 1e-5
        model[-1].weight[:, 5:9] *= 1e-5
    return model


@pytest.mark.slow
def test_slots_that_have_decayed_are_closed_and_cut_in_training_and_a_run_goes_on(tmp_path):
    model = decayed()
    widths = []

    def note(model, _):
        widths.extend([len(model[0].weight)] * model.training)

    model.register_forward_pre_hook(note)
    settings = {"settle": 1, "ramp": 0}
    tuned(model, out=tmp_path / "whole", **settings)
    assert widths[0] == 16
    assert widths[18] == 12, widths  # before the weights settle
    again = decayed()
    with stopped_at(again, 20):
        tuned(again, out=tmp_path, **settings)
    again = tuned(decayed(), out=tmp_path, resume=True, **settings)
    assert differing(tensors(again), tensors(model)) == []


def test_what_only_decays_shrinks_by_a_factor_that_is_known():
    settings = l0prune.Settings.of({"optimizer": "gsm", "budget": "macs=0.5", "lr": 0.03})
    found = gsm_defaults(settings, 30_000)
    w, z = 1.0, 0.0
    for _ in range(12_000):  # after the target has sunk
        z = found.momentum * z + found.weight_decay * w
        w -= found.lr * z
    assert math.log(w) == pytest.approx(-10, rel=0.05)
    given = settings.model_copy(update={"weight_decay": 0.02, "momentum": 0.5})
    assert gsm_defaults(given, 100) == given


def test_penalty_and_optimizer_are_one_setting():
    settings = l0prune.Settings.of({"penalty": "gsm", "budget": "macs=0.5"})
    assert settings.optimizer == "gsm"
    assert l0prune.Settings.of({"optimizer": "gsm", "budget": "macs=0.5"}).penalty == "gsm"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "gsm"}, "gsm has no price"),
        ({"optimizer": "gsm", "lam": 0.1, "budget": "macs=0.5"}, "gsm has no price"),
        ({"optimizer": "gsm", "penalty": "mcp", "budget": "macs=0.5"}, "any other penalty"),
        ({"optimizer": "adam", "penalty": "gsm", "budget": "macs=0.5"}, "any other penalty"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(UsageError, match=words):
        l0prune.Settings.of(settings)


def test_it_needs_gates_and_decay():
    with pytest.raises(UsageError, match="this model is trained without gates"):
        l0prune.train_dense(network(), data(), optimizer="gsm")
    with pytest.raises(UsageError, match="gsm needs weight decay"):
        tuned(gated(), weight_decay=0.0)
