"""Code that takes one size for another keeps its class: the calls are given theirs."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from deadness import close_some, randomise
from differences import difference
from networks import ReadsItsInput
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.files.checked_json import sealed
from l0prune.files.given_sizes import GIVEN, GivenSizes


class Remembers(ReadsItsInput):
    """As in ConViT: what it computes once from the input's size takes calls of its own."""

    positions = None

    def forward(self, x):
        if self.positions is None or self.positions.shape[1] != x.shape[1]:
            self.positions = torch.arange(x.shape[1]).to(x).view(1, x.shape[1], 1)
        return super().forward(x) + self.positions


class WrittenHeads(nn.Module):
    """Attention with its number of heads written into the code, also times the batch."""

    def __init__(self, dim=12):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            layer(x).view(rows, length, 3, 4).transpose(1, 2).reshape(rows * 3, length, 4)
            for layer in (self.q, self.k, self.v)
        )
        y = (q @ k.transpose(1, 2) / 2).softmax(-1) @ v
        return self.out(y.view(rows, 3, length, 4).transpose(1, 2).reshape(rows, length, 12))


class ByPieces(nn.Module):
    """Splits what is as wide as its input into pieces of sizes that it works out."""

    def __init__(self, dim=12):
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        third = x.shape[-1] // 3
        first, rest = torch.split(self.up(x), [third, x.shape[-1] - third], dim=-1)
        return self.down(torch.cat([first.relu(), rest.tanh()], -1))


class WrittenEpsilon(nn.Module):
    """A norm with a number for which it has no attribute; its weight is changed on the way."""

    def __init__(self, dim=12):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * self.weight


class OfConvolutions(nn.Module):
    """Queries that come from a convolution, and a scale that follows the size of the heads."""

    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.heads, self.qkv = heads, nn.Conv1d(dim, 3 * dim, 1)
        self.proj = nn.Conv1d(dim, dim, 1)

    def forward(self, x):
        x = x.transpose(1, 2)
        qkv = self.qkv(x).unflatten(1, (self.heads, -1)).transpose(-1, -2)
        q, k, v = qkv.chunk(3, dim=-1)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(-1, -2).flatten(1, 2)).transpose(1, 2)


class ScaledByHand(nn.Module):
    """Queries times a number that code works out from the size of its input; others stay."""

    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        rows, count, dim = x.shape
        qkv = (self.qkv(x) * 1.5).reshape(rows, count, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = q * (dim // self.heads) ** -0.5
        x = (q.matmul(k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)
        return 0.7 * self.proj(x.reshape(rows, count, dim))


class HeadsInTheBatch(nn.Module):
    """Heads are rows of the batch, and a bias is made of the queries (SAM, HaloNet)."""

    def __init__(self, heads=3, dim_head=3):
        super().__init__()
        self.num_heads, self.dim_head = heads, dim_head
        self.qkv, self.proj = nn.Linear(12, 27), nn.Linear(9, 12)
        self.positions = nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        rows, count, _ = x.shape
        qkv = self.qkv(x).view(rows, count, 3, self.num_heads, self.dim_head).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, rows * self.num_heads, count, -1)
        bias = (q @ self.positions.T).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x.view(rows, self.num_heads, count, -1).transpose(1, 2)
        return self.proj(x.reshape(rows, count, -1))


class NormAndActivation(nn.Module):
    """A norm that holds its activation (timm's LayerNormAct)."""

    def __init__(self, dim=12):
        super().__init__()
        self.shape, self.activation = (dim,), nn.GELU()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return self.activation(F.layer_norm(x, self.shape, self.weight, self.bias, 1e-3))


def network(inner):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), inner, nn.Linear(12, 3))
    return randomise(net).double().eval(), torch.randn(2, 5, 6, dtype=torch.float64)


def exported(inner, seed=1):
    model, x = network(inner)
    close_some(l0prune.gate(model, x, exclude="*.in"), seed=seed)
    return l0prune.export(model), model, x


@pytest.mark.parametrize(
    "make",
    [ReadsItsInput, Remembers, ByPieces, WrittenEpsilon, OfConvolutions, ScaledByHand,
     HeadsInTheBatch, WrittenHeads, NormAndActivation],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.one_in(18)
def test_it_keeps_its_class(make, seed):
    dense, model, x = exported(make(), seed)
    assert dense.rebuilt
    assert isinstance(dense.module[2], make)
    assert isinstance(dense.module[2], GivenSizes)
    assert difference(model, dense, (x,)) < 1e-12
    assert difference(model, dense, (torch.randn(3, 9, 6, dtype=torch.float64),)) < 1e-12


@pytest.mark.slow
def test_only_modules_that_need_it_are_given_sizes():
    dense, _, _ = exported(ReadsItsInput())
    assert dense._manifest["layers"] == {"1": "CutLayerNorm", "2": "GivenSizes"}
    assert all(GIVEN not in of for path, of in dense._manifest["attributes"].items() if path != "2")


@pytest.mark.slow
def test_heads_of_a_size_that_stays_are_not_read_off_the_input():
    """Of qkv only whole heads are cut: 12 // heads would be another size."""
    model, x = network(ReadsItsInput())
    chosen = l0prune.survey(model, x, own_class=False).plan
    heads = [axis.name for axis in chosen.axes if axis.kind == "head" or axis.name == "0"]
    l0prune.gate(model, x, include=heads)
    close_some(model, seed=2)
    small = l0prune.export(model)
    assert small.rebuilt
    call = small._manifest["attributes"]["2"][GIVEN][0]
    assert call[:2] == ["reshape", 5]
    assert call[2][-1] == 4


@pytest.mark.parametrize("make", [ReadsItsInput, ScaledByHand])
@pytest.mark.slow
def test_it_can_be_gated_again(make):
    dense, model, x = exported(make())
    again = l0prune.gate(copy.deepcopy(dense.module), x)
    torch.testing.assert_close(again(x), model.eval()(x), rtol=1e-12, atol=1e-12)
    smaller = l0prune.export(close_some(again, seed=3))
    assert smaller.rebuilt
    assert difference(again, smaller, (x,)) < 1e-12


def test_files_bring_the_sizes_back(tmp_path):
    dense, _, x = exported(ReadsItsInput())
    dense.save_pretrained(tmp_path / "net")
    dense.save(tmp_path / "net.pt")
    for path in (tmp_path / "net", tmp_path / "net.pt"):
        model = l0prune.resize(network(ReadsItsInput())[0], path)
        assert torch.equal(model(x), dense.module(x))
    with pytest.warns(UserWarning, match="this pickle holds layers that torch does not have"):
        torch.save(dense.module, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(whole(x), dense.module(x))


def test_a_damaged_manifest_changes_nothing(tmp_path):
    dense, _, x = exported(ReadsItsInput())
    dense.save_pretrained(tmp_path / "net")
    path = next((tmp_path / "net").glob("*.json"))
    changed = json.loads(path.read_text().replace('"reshape"', '"eval"'))
    path.write_text(json.dumps(sealed(changed)))
    model = network(ReadsItsInput())[0]
    before = model(x)
    with pytest.raises(FileError, match=r"2\.given_sizes cannot be"):
        l0prune.resize(model, tmp_path / "net")
    assert torch.equal(model(x), before)
    assert type(model[2]) is ReadsItsInput
