"""A certificate is given on inputs that the model can take, whatever those are."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from deadness import randomise
from differences import ROUNDED, difference
from networks import Fn
from torch import nn

import l0prune
from l0prune.errors import CertificateError
from l0prune.exporting import export
from l0prune.exporting.certify.inputs import trials
from l0prune.exporting.certify.verify import BATCHES
from l0prune.exporting.network import NotThisWay

T = 5
AHEAD = torch.ones(T, T).triu(1).bool()
MASKS = {
    "of infinities": {"attn_mask": torch.zeros(T, T).masked_fill(AHEAD, -torch.inf)},
    "of the lowest number": {"attn_mask": AHEAD * torch.finfo(torch.float32).min},
    "of booleans": {"attn_mask": AHEAD},
    "of padding": {"key_padding_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()},
}


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x, **masks):
        x = self.a(x)
        return self.b(self.attention(x, x, x, need_weights=False, **masks)[0])


def small():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return l0prune.gate(model, torch.randn(2, 6))


def edge_products(m, x, edges):
    h = m.a(x).relu()
    return m.b(h[edges[0]] * h[edges[1]])


def close_half(model):
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return model


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.one_in(4)
def test_masks_leave_each_row_something(name):
    model = l0prune.gate(randomise(Attending()).eval(), (torch.randn(2, T, 6),), MASKS[name])
    small = l0prune.export(close_half(model))
    assert {check.batch for check in small.certificate.checks}
    assert difference(model, small, torch.randn(2, T, 6), MASKS[name]) <= ROUNDED


def test_a_logarithm_gets_positive_numbers():
    model = Fn(lambda m, x: m.b(m.a(x.log()).relu()), a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    model = l0prune.gate(model.eval(), (torch.rand(2, 6) + 0.1,))
    small = l0prune.export(close_half(model))
    assert {check.batch for check in small.certificate.checks} == set(BATCHES)


def test_edges_stay_with_their_nodes():
    model = Fn(edge_products, a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    example = (torch.randn(6, 6), torch.randint(0, 6, (2, 10)))
    small = l0prune.export(close_half(l0prune.gate(model.eval(), example)))
    assert small.certificate.checks


def test_weights_that_are_no_numbers_are_said_to_be():
    model = small()
    with torch.no_grad():
        model[2].bias[0] = float("nan")
    with pytest.raises(CertificateError, match="weights or gates that hold nan"):
        l0prune.export(model)


def test_a_wrong_model_is_found_on_the_first_kind(monkeypatch):
    """What fails on inputs that the model takes is never tried again on easier ones."""
    model = small()
    tried = []

    def not_this_way(network):
        raise NotThisWay

    def wrong(answers, dense):
        tried.append(answers)
        raise CertificateError("the cut is wrong")

    monkeypatch.setattr(sys.modules["l0prune.exporting.certify.verify"], "compare", wrong)
    monkeypatch.setattr(export, "BY_PLAN", (not_this_way,))
    with pytest.raises(CertificateError, match="the cut is wrong"):
        l0prune.export(model)
    assert len(tried) == 1


def test_kinds_come_nearer_to_the_example():
    example = ((torch.rand(3, 4) + 1, torch.arange(3)), {})
    fresh, rows, last = trials(example, (2, 5))
    assert [given[0][0].shape for given in fresh] == [(2, 4), (5, 4)]
    for given in rows:
        ids = given[0][1]
        ratio = given[0][0] / example[0][0][ids]
        assert bool(((ratio > 0.69) & (ratio < 1.31) & (ratio != 1)).all())
    assert last == (example,)
    assert F.one_hot(rows[1][0][1], 3).shape == (5, 3)


def test_a_detector_is_compared_where_it_finds_something(tmp_path):
    """In noise its outputs are near 0, where a runtime's sigmoid is right to few digits."""
    pattern = torch.tensor([1.0, -1.0]).repeat(16)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()).eval()
    with torch.no_grad():
        model[0].weight.copy_(pattern * torch.linspace(0.5, 1.5, 32)[:, None])
        model[0].bias.zero_()
        model[2].weight.fill_(20 / 32**2)
        model[2].bias.fill_(-25)
    x = 3 * pattern * torch.tensor([[1.0], [1.1]])
    model = close_half(l0prune.gate(model, x, exclude=["0.in"]))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[1::2] = 9
    small = l0prune.export(model)
    assert {check.batch for check in small.certificate.checks} == set(BATCHES)
    (piece,) = small.pieces
    assert piece.answers[0].scales[0] > 0.01
    small.save_onnx(tmp_path / "net.onnx")
