"""Norms as people write them, in the class of their own after a cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cut_networks import OPTIMIZERS, compare, gated
from deadness import close_some, randomise
from differences import difference
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.files.cut_layers import CutGroupNorm, CutLayerNorm


class Rms(nn.Module):
    """As in Llama; ``plus`` as in Gemma."""

    def __init__(self, size, plus=0.0):
        super().__init__()
        self.weight, self.variance_epsilon, self.plus = nn.Parameter(torch.ones(size)), 1e-2, plus

    def forward(self, x):
        half = x.to(torch.float32)
        half = half * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.plus) * half.to(x.dtype)


class ChannelsFirst(nn.LayerNorm):
    """As in ConvNeXt."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """As in ConvNeXt V2."""

    def __init__(self, size):
        super().__init__()
        self.eps = 1e-2
        self.weight, self.bias = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        norms = x.norm(p=2, dim=(2, 3), keepdim=True)
        norms = norms / (norms.mean(dim=1, keepdim=True) + self.eps)
        return x + self.weight.view(1, -1, 1, 1) * (x * norms)


class Centred(nn.Module):
    """No number of it can make up for what is gone."""

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)).relu()


class ByHand(nn.Module):
    """A LayerNorm over channels that come first, of means and powers; shift before scale."""

    def __init__(self, size):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, size, 1, 1))
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        centred = x - x.mean(dim=1, keepdim=True)
        x = centred / (centred**2).mean(1, keepdim=True).add(1e-3).sqrt() + self.shift
        return x * self.scale.view(-1, 1, 1)


class ByLastDim(nn.Module):
    """A LayerNorm over the last dim, of a variance."""

    def __init__(self, size):
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.gain * ((x - x.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt()) + self.offset


class TwoTowers(nn.Module):
    """One tower for rows and for sequences of rows."""

    def __init__(self, norm):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3))

    def forward(self, x):
        return self.tower(x), self.tower(x[:, 0])


def of_rows(norm):
    return nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3)), torch.randn(2, 4, 5)


def of_images(norm):
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 2, 1)), torch.randn(2, 3, 6, 6)


KEEP_THEIR_CLASS = {
    "rms": (lambda: of_rows(Rms(8)), Rms),
    "rms plus one": (lambda: of_rows(Rms(8, 1.0)), Rms),
    "torch's rms": (lambda: of_rows(nn.RMSNorm(8, eps=1e-2)), nn.RMSNorm),
    "response norm": (lambda: of_images(ResponseNorm(8)), ResponseNorm),
    "layer norm": (lambda: of_rows(nn.LayerNorm(8)), CutLayerNorm),
    "layer norm without weights": (
        lambda: of_rows(nn.LayerNorm(8, elementwise_affine=False)),
        CutLayerNorm,
    ),
    "channels first": (lambda: of_images(ChannelsFirst(8)), CutLayerNorm),
    "one group": (lambda: of_images(nn.GroupNorm(1, 8)), CutGroupNorm),
}


@pytest.mark.parametrize("name", KEEP_THEIR_CLASS)
@pytest.mark.one_in(3)
def test_norms_of_which_channels_are_gone(name):
    torch.manual_seed(0)
    make, kind = KEEP_THEIR_CLASS[name]
    model, x = make()
    model = randomise(model).double().eval()
    close_some(l0prune.gate(model, x.double(), include="0"), seed=1)
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert small.widths["0"][0] < 8
    assert type(small.module[1]) is kind
    assert difference(model, small, x.double()) <= 1e-12
    if isinstance(small.module[1], nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        assert f"{small.widths['0'][0]}" in repr(small.module[1])


@pytest.mark.parametrize("save", ["state.pt", "state.safetensors"])
@pytest.mark.parametrize("make", [lambda: of_images(ByHand(8)), lambda: of_rows(ByLastDim(8))])
@pytest.mark.one_in(4)
def test_norms_by_hand_are_given_zeros_in_the_places_of_what_is_gone(make, save, tmp_path):
    torch.manual_seed(0)
    model, x = make()
    untouched = copy.deepcopy(model)
    model, x = randomise(model).double().eval(), x.double()
    close_some(l0prune.gate(model, x, include="0"), seed=1)
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert small._manifest["layers"]["1"] == "PaddedNorm"
    assert type(small.module[1]).__name__ == type(model[1]).__name__ == type(untouched[1]).__name__
    assert difference(model, small, x) <= 1e-12
    small.save(tmp_path / save)
    again = l0prune.resize(untouched.double().eval(), tmp_path / save)
    assert torch.equal(again(x), small.module(x))


def test_a_norm_by_hand_that_is_cut_in_training_learns_what_the_masked_one_does():
    torch.manual_seed(0)
    model, x = of_images(ByHand(8))
    model = gated(randomise(model), (x,))
    assert compare(model, x.double(), OPTIMIZERS["momentum"]) == ""


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Rms], ids=lambda n: n.__name__)
@pytest.mark.one_in(3)
def test_a_norm_that_is_called_on_inputs_of_different_rank(norm):
    torch.manual_seed(0)
    model, x = TwoTowers(norm(8)), torch.randn(2, 4, 5, dtype=torch.float64)
    model = randomise(model).double().eval()
    close_some(l0prune.gate(model, x, include="tower.0"), seed=1)
    small = l0prune.export(model)
    assert type(small.module) is TwoTowers, small.note
    assert small.widths["tower.0"][0] < 8
    assert difference(model, small, x) <= 1e-12


def test_the_file_of_what_is_rebuilt_holds_what_the_layers_became():
    torch.manual_seed(0)
    model, x = of_rows(nn.LayerNorm(8))
    close_some(l0prune.gate(randomise(model).eval(), x), seed=1)
    small = l0prune.export(model)
    left = small.widths["0"][0]
    assert small._manifest["layers"]["1"] == "CutLayerNorm"
    assert small._manifest["attributes"]["1"] == {
        "normalized_shape": (left,),
        "inputs": 8,
        "dim": -1,
    }
    own, written = small.module.state_dict(), small._state_now()
    assert own.keys() == written.keys()
    assert all(torch.equal(own[name], written[name]) for name in own)


def test_where_no_number_helps_its_mean_is_told_of_what_there_was():
    torch.manual_seed(0)
    model, x = of_rows(Centred())
    model, x = randomise(model).double().eval(), x.double()
    close_some(l0prune.gate(model, x, exclude="*.in"), seed=1)
    small = l0prune.export(model)
    assert small.rebuilt
    assert small._manifest["layers"] == {"1": "GivenSizes"}
    assert difference(model, small, x) <= 1e-10


def test_a_linear_that_reads_some_inputs_is_cut_again(tmp_path):
    """Its file is one for the original, or for the model that the first one made."""
    torch.manual_seed(0)
    build = lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))  # noqa: E731
    model, x = randomise(build()).eval(), torch.randn(4, 8)
    for name, closed in (("first", [1, 4, 6]), ("second", [0, 3])):
        bank = l0prune.gates(l0prune.gate(model, x))
        with torch.no_grad():
            bank.log_alpha.fill_(20.0)
            bank.log_alpha[next(a for a in bank.axes if a.name == "0.in").slice][closed] = -20.0
        small = l0prune.export(model)
        assert small.rebuilt
        assert difference(model, small, x) <= 1e-6
        small.save_pretrained(tmp_path / name)
        model = copy.deepcopy(small.module)
    assert model[0].kept.tolist() == [2, 3, 7]
    for fresh in (build(), l0prune.resize(build(), tmp_path / "first")):
        loaded = l0prune.resize(fresh, tmp_path / "second")
        assert torch.equal(loaded(x), model(x))
    vars(model).pop("l0prune_cut")
    l0prune.export(close_some(l0prune.gate(model, x), seed=1)).save_pretrained(tmp_path / "third")
    with pytest.raises(FileError, match="for a model that has been cut before"):
        l0prune.resize(build(), tmp_path / "third")
    third = l0prune.resize(loaded, tmp_path / "third")
    torch.testing.assert_close(third(x), model(x))
