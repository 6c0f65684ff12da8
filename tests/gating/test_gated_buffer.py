"""Gates on buffers that are added to a stream: they stay buffers, and nothing else changes."""

from __future__ import annotations

import copy
import pickle

import cut_networks
import pytest
import torch
import torch.nn.functional as F
from cut_networks import OPTIMIZERS, compare
from torch import nn

import l0prune
from l0prune.gating.attaching import bypass

X = torch.randn(4, 6, 10)


class Encoder(nn.Module):
    """A fixed table of positions on a stream that a LayerNorm reads.

    ``learns`` moves the table in training mode, as a running mean is moved.
    """

    def __init__(self, persistent=True, learns=False):
        super().__init__()
        self.embed = nn.Linear(10, 8)
        self.register_buffer("table", torch.randn(6, 8), persistent=persistent)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)
        self.learns = learns

    def forward(self, x):
        x = self.embed(x) + self.table[: x.shape[1]]
        if self.training and self.learns:
            self.table.mul_(0.5)
        return self.head(x + self.down(F.relu(self.up(self.norm(x)))))


def gated(**settings):
    """With slots 1 and 5 of the stream closed; and the same network ungated."""
    torch.manual_seed(0)
    plain = Encoder(**settings).eval()
    model = l0prune.gate(copy.deepcopy(plain), (X,))
    bank = l0prune.gates(model)
    assert [(axis.name, axis.size) for axis in bank.axes[:2]] == [("embed", 8), ("up", 12)]
    with torch.no_grad():
        bank.log_alpha.fill_(20.0)
        bank.log_alpha[[1, 5]] = -20.0
    return model, plain


def masked(plain):
    """The network in which each tensor that writes the stream is zero at these slots."""
    with torch.no_grad():
        for tensor in (plain.embed.weight, plain.embed.bias, plain.norm.bias, plain.norm.weight):
            tensor[[1, 5]] = 0
        for tensor in (plain.down.weight, plain.down.bias):
            tensor[[1, 5]] = 0
        plain.table[:, [1, 5]] = 0
    return plain


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.one_in(2)
def test_a_buffer_reads_as_its_product_and_stays_one(persistent):
    model, plain = gated(persistent=persistent)
    assert dict(model.named_buffers())["table"] is model._buffers["table"]
    assert torch.equal(model._buffers["table"], plain.table)
    assert ("table" in model.state_dict()) == persistent
    assert set(model.state_dict()) == {*plain.state_dict(), "l0prune_gates.log_alpha"}
    expected = plain.table.clone()
    expected[:, [1, 5]] = 0
    assert torch.equal(model.table, expected)
    with bypass(model):
        assert torch.equal(model.table, plain.table)
    assert torch.allclose(model(X), masked(plain)(X), atol=1e-6)


def test_ungated_it_is_what_came_in():
    model, plain = gated()
    table = model._buffers["table"]
    l0prune.ungate(model)
    assert type(model) is Encoder
    assert model.table is table
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.one_in(2)
def test_copies_are_gated_alike(again):
    model, _ = gated()
    other = again(model)
    assert torch.equal(other(X), model(X))
    other._buffers["table"].zero_()
    assert not torch.equal(other(X), model(X))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_gated_file_and_an_export_have_it(persistent, tmp_path):
    model, plain = gated(persistent=persistent)
    before = model(X).detach()
    l0prune.save(model, tmp_path / "gated.pt")
    assert torch.equal(l0prune.load(tmp_path / "gated.pt", copy.deepcopy(plain))(X), before)
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert dict(small.module.named_buffers())["table"].shape == (6, 6)
    assert torch.allclose(small.module(X), before, atol=1e-6)
    small.save(tmp_path / "dense.pt")
    loaded = l0prune.load(tmp_path / "dense.pt", copy.deepcopy(plain))
    assert torch.allclose(loaded(X), before, atol=1e-6)


def test_what_the_forward_writes_goes_into_the_buffer():
    model, plain = gated(learns=True)
    model.train()(X)
    assert torch.equal(model._buffers["table"], plain.table / 2)
    model.table.fill_(3.0)
    assert torch.equal(model._buffers["table"], torch.full((6, 8), 3.0))
    model.table = torch.ones(6, 8)
    assert "table" in model._buffers
    assert model.eval().table[0].tolist() == [1, 0, 1, 1, 1, 0, 1, 1]


def test_a_gate_learns_through_it():
    model, plain = gated()
    bank = l0prune.gates(model)
    z = torch.ones(bank.plan.size, requires_grad=True)
    with bank.using(z):
        (slope,) = torch.autograd.grad(model.table.square().sum(), z)
    assert torch.allclose(slope[:8], 2 * plain.table.square().sum(0))


def test_a_magnitude_counts_it():
    """Scores of one axis are as the norms of all that its gates multiply."""
    model, plain = gated()
    by_slot = (plain.embed.weight.T, plain.embed.bias[None], plain.table, plain.down.weight.T)
    by_slot += (plain.down.bias[None], plain.up.weight)
    squares = sum(each.detach().double().square().sum(0) for each in by_slot)
    score = l0prune.score(model, "magnitude")[:8]
    assert torch.allclose(score / score.sum(), squares.sqrt() / squares.sqrt().sum())


def test_it_is_cut_while_the_model_trains():
    network, x = Encoder().double(), X.double()
    assert compare(cut_networks.gated(network, (x,)), x, OPTIMIZERS["momentum"]) == ""
