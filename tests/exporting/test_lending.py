"""A model in another dtype that borrows its weights: the same numbers, and nothing is written."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l0prune
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.dtypes import lent, placed
from l0prune.exporting.certify.lending import Lent, folded, settle


class Many(nn.Module):
    """Weights that are read in every way: by layers, by functions, bare, tied, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, max_norm=1.0)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 4, 5, 4))
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 10)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, ids):
        x, _ = self.lstm(self.table(ids))
        x = self.layer(self.attention(x, x, x)[0])
        keys = x.view(len(x), -1, 4, 4).transpose(1, 2)
        attended = F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), keys, keys)
        with torch.no_grad():
            self.head.bias.add_(1.0)
        return self.head(self.norm(x)), attended, self.cell(x[:, 0], x[:, 1]), self.head.bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_computes_what_a_copy_does_and_writes_nothing(dtype):
    torch.manual_seed(0)
    model, ids = Many().eval(), torch.randint(0, 10, (3, 5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = output_of(lent(model, dtype), ((ids,), {}), dtype)
    expected = output_of(copy.deepcopy(model).to(dtype), ((ids,), {}), dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours + 0, theirs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_second_set_of_weights_is_held():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    model[1].weight.a_note = "mine"
    borrower = lent(model, torch.float64)
    for own, borrowed in zip(model.parameters(), borrower.parameters(), strict=True):
        assert isinstance(borrowed, nn.Parameter)
        assert (type(borrowed), borrowed.dtype) == (Lent, torch.float64)
        assert borrowed.loan.original.data_ptr() == own.data_ptr()
    assert borrower[1].weight.a_note == "mine"


def test_an_export_writes_into_no_weight_of_the_user():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6, max_norm=0.5), nn.Linear(6, 5), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].weight.mul_(3)
    ids = torch.randint(0, 10, (4,))
    l0prune.gate(model.eval(), (ids,))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = l0prune.export(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    assert theirs.isdisjoint(parameter.data_ptr() for parameter in small.module.parameters())


@pytest.mark.slow
def test_an_export_is_of_the_weights_at_its_time(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(3, 6)
    small = l0prune.export(l0prune.gate(model, (x,)))
    expected = small.module(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(small.module(x), expected)
    small.save_onnx(tmp_path / "model.onnx")  # compares with what the gated model was


def test_what_is_lent_from_is_moved_and_stays_lent():
    """A network of float64 is as large on its new device as what it was lent from."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).bfloat16()
    model[1].bias = model[0].bias  # tied
    before = [parameter.data_ptr() for parameter in model.parameters()]
    borrower = placed(lent(model, torch.float64), torch.device("meta"))
    for parameter in borrower.parameters():
        assert (type(parameter), parameter.dtype) == (Lent, torch.float64)
        assert parameter.device.type == parameter.loan.original.device.type == "meta"
        assert parameter.loan.original.dtype == torch.bfloat16
    assert borrower[1].bias is borrower[0].bias
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_settling_lets_go_of_what_was_lent_from():
    module = nn.Linear(6, 5)
    stored = torch.randn(5, 6)
    module.weight = nn.Parameter(folded(stored, lambda wide: wide.mul_(2)))
    gone, expected = weakref.ref(stored), stored.double() * 2
    del stored
    settle(module, torch.float32)
    assert gone() is None
    assert torch.equal(module.weight, expected.float())
