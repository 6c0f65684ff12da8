"""Errors of outputs with other weights, where what lies before these is not run again."""

import copy

import pytest
import torch
from torch import nn

from l0prune.features.unlabelled.fidelity import relative_error
from l0prune.features.unlabelled.lockstep import Forward, Weights
from l0prune.features.unlabelled.probes import Probe, beginning
from l0prune.features.unlabelled.uses import uses_of


class Residual(nn.Module):
    """Writes into a residual sum through a view, splits, and reads a shape from a result."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(16, 3)
        self.ran = 0

    def forward(self, x):
        x = x.clone()
        first = x[:, :4]
        for layer in self.layers:
            self.ran += 1
            y = torch.relu_(layer(x))
            x += y
            first.mul_(0.5)
            y.mul_(2)
        left, right = torch.cat([x, y], 1).chunk(2, 1)
        return self.out(torch.cat([right, left[: len(y)]], 1))


class Counts(nn.Module):
    """Its buffer counts its forwards, and its outputs hold the count."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.second(torch.tanh(self.first(x)) + self.count)


class Turns(nn.Module):
    """Takes another way as soon as a weight is another."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(90, 90), nn.Linear(90, 90), nn.Linear(90, 2)

    def forward(self, x):
        before = torch.tanh(self.first(x))
        after = self.second(before)
        return self.third(after + before if after.abs().sum() > 0 else after)


class Heads(nn.Module):
    """Has an output that is complete before the layers of the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(9, 99), nn.Linear(99, 99), nn.Linear(99, 99)

    def forward(self, x):
        x = self.first(x)
        return {"early": torch.sigmoid(x), "late": self.third(torch.tanh(self.second(x)))}


def exact(model, name, x):
    """The error with one layer's weight halved, by the model itself."""
    changed = copy.deepcopy(model)
    judge = relative_error(copy.deepcopy(model)(x), x)
    changed.get_parameter(name).mul_(0.5)
    return judge(changed(x))


def halved(model, probe, name, x):
    layer = model.get_submodule(name.rpartition(".")[0])
    (view,) = (view for view in uses_of(model, x).readers if view.name == name)
    return probe.error({view: lambda: (0.5 * layer.weight.T[None], layer.bias[None])})


@torch.no_grad()
def test_errors_are_those_of_the_changed_network_in_any_order():
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2000, 8)
    probe = Probe(model, Weights(model), x, relative_error)
    for at in (0, 1, 1, 3, 2, 3, 3):
        name = f"layers.{at}.weight"
        assert halved(model, probe, name, x) == pytest.approx(exact(model, name, x), rel=1e-5)
    assert halved(model, probe, "out.weight", x) == pytest.approx(exact(model, "out.weight", x))


@torch.no_grad()
def test_an_output_that_is_complete_before_the_change_is_compared(monkeypatch):
    torch.manual_seed(0)
    model, x = Heads().eval(), torch.randn(100, 9)
    probe = Probe(model, Weights(model), x, relative_error)
    memory = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *of, **by: memory(*of, **by).fill_(1e9))
    for _ in range(2):  # the second run starts in the middle
        wanted = exact(model, "third.weight", x)
        assert halved(model, probe, "third.weight", x) == pytest.approx(wanted, rel=1e-5)
    assert 0.05 < wanted < 0.5


@torch.no_grad()
def test_operators_before_the_change_are_run_once(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval(), torch.randn(100, 64)
    probe = Probe(model, Weights(model), x, relative_error)
    (view,) = (view for view in uses_of(model, x).readers if view.name == "4.weight")
    ran, asked = [], Forward._asked
    monkeypatch.setattr(Forward, "_asked", lambda self, job: (ran.append(job), asked(self, job))[1])
    found = []
    for expected in (4 + 1, 1):  # the first run moves the start to the fifth layer
        ran.clear()
        found.append(probe.error({view: lambda: (torch.zeros(1, 64, 64), None)}))
        products = [job for job in ran if job and "addmm" in str(job)]
        assert len(products) == expected  # and the changed one, which the caller computes
    assert found[0] == found[1]


@torch.no_grad()
def test_a_forward_that_writes_into_the_model_is_run_whole():
    torch.manual_seed(0)
    model, x = Counts().eval(), torch.randn(50, 4)
    probe = Probe(model, Weights(model), x, relative_error)
    before = int(model.count)
    halved(model, probe, "second.weight", x)
    assert int(model.count) == before + 2  # uses_of, and this one


@torch.no_grad()
def test_a_forward_that_takes_another_way_is_run_whole():
    torch.manual_seed(0)
    model, x = Turns().eval(), torch.randn(100, 90)
    model.second.bias.zero_()
    judge = relative_error(model(x), x)
    probe = Probe(model, Weights(model), x, relative_error)
    (view,) = (view for view in uses_of(model, x).readers if view.name == "second.weight")
    for _ in range(2):
        found = probe.error({view: lambda: (0 * model.second.weight.T[None], None)})
        again = model.third(torch.zeros(100, 90) + model.second.bias)
        assert found == pytest.approx(judge(again))


class Running(nn.Module):
    """Sums of embeddings up to each place, or over all places."""

    def __init__(self, *, is_causal):
        super().__init__()
        self.embedding, self.out, self.is_causal = nn.Embedding(11, 8), nn.Linear(8, 11), is_causal

    def forward(self, ids, shift=None):
        x = self.embedding(ids)
        x = x.cumsum(1) if self.is_causal else x + x.mean(1, keepdim=True)
        return self.out(torch.tanh(x if shift is None else x + shift))


def test_places_at_the_beginning_stand_alone_in_a_causal_network():
    torch.manual_seed(0)
    ids = torch.randint(11, (2, 12))
    found = beginning(Running(is_causal=True), ids, 5)
    assert torch.equal(found, ids[:, :5])
    given = {"ids": ids, "shift": torch.ones(2, 12, 8)}
    assert beginning(Running(is_causal=True), given, 5)["shift"].shape == (2, 5, 8)
    assert beginning(Running(is_causal=True), ids, 12) is None
    assert beginning(Running(is_causal=False), ids, 5) is None
    assert beginning(nn.Sequential(nn.Embedding(11, 4), nn.Flatten()), ids, 5) is None
    fixed = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
    assert beginning(fixed, torch.randn(2, 12), 5) is None
