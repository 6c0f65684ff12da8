"""Recurrent layers of every kind: closed units are dead, and the cut layer is of the same class."""

from __future__ import annotations

import copy

import pytest
import torch
from counting import flops
from deadness import close_some, randomise, relative_effect_of_dead_slots
from networks import Fn
from torch import nn

import l0prune
from l0prune.plan.cost import CostModel

X = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0))
# kind, layers, two directions, size of projections, biases, batch first
EVERY = [
    ("lstm", 1, False, 0, True, True),
    ("lstm", 2, True, 0, False, True),
    ("lstm", 3, False, 4, True, False),
    ("lstm", 1, True, 4, False, True),
    ("gru", 3, False, 0, False, False),
    ("gru", 2, True, 0, True, True),
    ("tanh", 2, False, 0, True, True),
    ("tanh", 1, True, 0, False, False),
    ("relu", 1, False, 0, False, True),
    ("relu", 2, True, 0, True, False),
]


def network(kind, layers, two_ways, projection, bias, batch_first):
    """Everything is read: all steps, and the last state of the last layer (and its cells)."""
    settings = {"num_layers": layers, "bidirectional": two_ways, "bias": bias}
    settings |= {"batch_first": batch_first, "dropout": 0.2 if layers > 1 else 0}
    if kind == "lstm":
        layer = nn.LSTM(8, 6, proj_size=projection, **settings)
    else:
        layer = (
            nn.GRU(8, 6, **settings)
            if kind == "gru"
            else nn.RNN(8, 6, nonlinearity=kind, **settings)
        )

    def forward(m, x):
        y, state = m.r(m.a(x if batch_first else x.transpose(0, 1)))
        last = torch.cat([state[0][-1], state[1][-1]], 1) if kind == "lstm" else state[-1]
        return m.b(y), m.c(last)

    size = projection or 6
    ends = nn.Linear(size + 6 if kind == "lstm" else 6, 2)
    layers = {"a": nn.Linear(7, 8), "r": layer, "b": nn.Linear(size * (1 + two_ways), 3), "c": ends}
    return randomise(Fn(forward, **layers)).double().eval()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("settings", EVERY, ids=str)
@pytest.mark.one_in(12)
def test_closed_units_are_dead(settings):
    module = network(*settings)
    plan, error = relative_effect_of_dead_slots(module, (X.double(),))
    found = {axis.name: axis.size for axis in plan.axes}
    projected = {"r.projection": settings[3]} if settings[3] else {}
    assert found == {"a": 8, "r": 6, **projected, "a.in": 7}
    assert error <= 1e-12
    assert 2 * CostModel(plan).dense("macs") * len(X) == flops(module, X.double())


@pytest.mark.parametrize("settings", EVERY[1::2], ids=str)
@pytest.mark.one_in(3)
def test_the_cut_layer_is_one_of_torchs_own(settings):
    model = l0prune.gate(network(*settings), (X.double(),), exclude="*.in")
    close_some(model, seed=2)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(X.double())
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    layer = small.module.r
    assert layer.hidden_size == small.widths["r"][0] < 6
    assert layer.input_size == small.widths["a"][0] < 8
    with torch.no_grad():
        found = small.module(X.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12
    assert sum(p.numel() for p in small.module.parameters()) == small.params
    assert 2 * small.macs * len(X) == flops(small.module, X.double())


def test_a_projection_stays_smaller_than_its_cells():
    """By their sizes alone torch tells an LSTM with projections from one without."""
    model = l0prune.gate(network("lstm", 1, False, 4, True, True), (X.double(),), exclude="*.in")
    bank = l0prune.gates(model)
    (cells,) = [axis for axis in bank.axes if axis.name == "r"]
    with torch.no_grad():
        bank.log_alpha.fill_(5)
        bank.log_alpha[cells.slice][1:] = -5
    small = l0prune.export(model)
    assert small.rebuilt
    assert (small.widths["r"], small.widths["r.projection"]) == ((5, 6), (4, 4))
    assert (small.module.r.hidden_size, small.module.r.proj_size) == (5, 4)
    assert sum(p.numel() for p in small.module.parameters()) == small.params
    with torch.no_grad():
        for ours, theirs in zip(small.module(X.double()), model(X.double()), strict=True):
            assert (ours - theirs).abs().max() <= 1e-12


def test_states_that_the_user_gives_keep_the_size():
    layers = {"r": nn.LSTM(7, 6, batch_first=True), "b": nn.Linear(6, 3)}
    model = Fn(lambda m, x, h, c: m.b(m.r(x, (h, c))[0]), **layers)
    survey = l0prune.survey(model, (X, torch.randn(1, 4, 6), torch.randn(1, 4, 6)))
    assert not survey.axes
    reasons = {pin.where: pin.reason for pin in survey.pins}
    assert "the model's input 'args_1'" in reasons["r.weight_hh_l0 dim 1"]


def test_states_that_a_layer_makes_are_cut_with_the_units():
    layers = {
        "r": nn.GRU(7, 6, 2, batch_first=True),
        "first": nn.Linear(7, 12),
        "b": nn.Linear(6, 3),
    }

    def forward(m, x):
        start = m.first(x[:, 0]).tanh().view(-1, 2, 6).transpose(0, 1).contiguous()
        return m.b(m.r(x, start)[0])

    model = randomise(Fn(forward, **layers))
    plan, error = relative_effect_of_dead_slots(model, (X,))
    assert [axis.size for axis in plan.axes][:1] == [6]
    assert error <= 1e-12


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_state_that_does_not_begin_with_zero_is_not_zero(kind):
    """A mean over the units reads them without a weight: exact only where a closed one is zero."""
    layer = nn.LSTM(7, 6, batch_first=True) if kind == "lstm" else nn.GRU(7, 6, batch_first=True)

    def started(make):
        def forward(m, x):
            start = getattr(x, make)((1, len(x), 6))
            y, _ = m.r(x, (start, start) if kind == "lstm" else start)
            return m.b(y) * y.mean(-1, keepdim=True)

        return randomise(Fn(forward, r=layer, b=nn.Linear(6, 3)))

    plan, error = relative_effect_of_dead_slots(started("new_zeros"), (X,))
    assert [axis.name for axis in plan.axes] == ["r"]
    assert error <= 1e-12
    assert not l0prune.survey(started("new_ones"), (X,)).axes


@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_cells_of_plain_rnns(kind):
    def forward(m, x):
        h = None
        for t in range(x.shape[1]):
            h = m.r(x[:, t], h)
        return m.b(h)

    cell = nn.RNNCell(7, 6, bias=False, nonlinearity=kind)
    plan, error = relative_effect_of_dead_slots(Fn(forward, r=cell, b=nn.Linear(6, 3)), (X,))
    assert [axis.name for axis in plan.axes] == ["r"]
    assert error <= 1e-12
