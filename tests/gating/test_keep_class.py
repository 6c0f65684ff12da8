"""Which gates a model gets so that an export is of its own class."""

from __future__ import annotations

import pytest
import torch
from deadness import close_some, randomise
from differences import difference
from networks import ReadsItsInput
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.files.cut_layers import OWN, SkippedModule
from l0prune.files.given_sizes import GivenSizes


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(12), attention
        self.mlp = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Torchs(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(12, 3, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def network(attention):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), Block(attention), nn.Linear(12, 3))
    return randomise(net).double().eval(), torch.randn(2, 5, 6, dtype=torch.float64)


@pytest.mark.slow
def test_a_size_that_is_read_off_one_dim_and_used_for_another_is_said_beforehand():
    model, x = network(ReadsItsInput())
    survey = l0prune.survey(model, x)
    said = (
        "1.attention reads the size of 0 off its input and uses it for "
        "1.attention.qkv.heads×1.attention.qkv.head_dim, too"
    )
    assert survey.to_dict()["reused_sizes"] == [said]
    assert "keep_class='native'" in str(survey)
    close_some(l0prune.gate(model, x, branches=False), seed=1)
    small = l0prune.export(model)
    assert small.rebuilt
    assert small.note.startswith("torch.save(module)")  # and no more than that
    assert "\n" not in small.note
    assert type(small.module[1].attention).__name__ == "ReadsItsInput"


class HasNumbers(nn.Module):
    """A size in its code, and a mean with an epsilon there."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        h = self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2))
        return self.down(h.reshape(-1, 5, 8).relu())


def test_a_size_in_the_code_is_said_beforehand():
    model, x = network(HasNumbers())
    said = l0prune.survey(model, x).to_dict()["reused_sizes"]
    assert said == [
        "1.attention has the size of 1.attention.up from its code, not from an attribute"
    ]


@pytest.mark.parametrize("make", [ReadsItsInput, Torchs, HasNumbers])
@pytest.mark.one_in(2)
def test_native_gates_only_what_needs_no_other_layer(make):
    model, x = network(make())
    l0prune.gate(model, x, keep_class="native")
    assert [axis.name for axis in l0prune.gates(model).axes] == ["1.mlp.0"]
    close_some(model, seed=1)
    small = l0prune.export(model)
    assert small.rebuilt
    assert not any(isinstance(module, (*OWN, SkippedModule)) for module in small.module.modules())
    assert difference(model, small, x) <= 1e-10


class OneNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.a, self.b = 8, nn.Linear(4, 8), nn.Linear(4, 8)
        self.c, self.d = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        a, b = (each(x).view(-1, self.width).tanh() for each in (self.a, self.b))
        return self.c(a) + self.d(b)


@pytest.mark.parametrize("keep_class", [True, False])
def test_dims_with_one_number_keep_as_many_slots_if_the_class_is_to_be_kept(keep_class):
    model, x = randomise(OneNumber()).double().eval(), torch.randn(3, 4, dtype=torch.float64)
    l0prune.gate(model, x, keep_class=keep_class, exclude="*.in", branches=False)
    bank = l0prune.gates(model)
    with torch.no_grad():
        bank.log_alpha.fill_(-9.0)
        for axis, number in zip(bank.axes, (3, 5), strict=True):
            bank.log_alpha[axis.slice][:number] = 9.0
    small = l0prune.export(model)
    assert small.rebuilt
    assert any(isinstance(each, GivenSizes) for each in small.module.modules()) is not keep_class
    assert [kept for kept, _ in small.widths.values()] == ([5, 5] if keep_class else [3, 5])
    assert small.params == sum(p.numel() for p in small.module.parameters())
    assert difference(model, small, x) <= 1e-10


def test_what_it_may_be():
    model, x = network(ReadsItsInput())
    with pytest.raises(UsageError, match="keep_class must be True, False or 'native', not 'yes'"):
        l0prune.gate(model, x, keep_class="yes")
