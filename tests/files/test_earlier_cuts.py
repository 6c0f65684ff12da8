"""Models that are cut, trained and cut again, and the files of the last cut."""

import copy

import pytest
import torch
from deadness import randomise
from round_trips import through_pickle
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.files import cut_layers


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """The LayerNorms become other layers once the stream is cut, and skipped ones without it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
ROUNDS = [{"first": [1]}, {"layers.1": [0], "layers.2.up": [2, 3]}, {"layers.0": [0], "first": [0]}]


def cut_again(model, closed):
    """Close the named slots, by what an axis or a branch begins with, and export."""
    bank = l0prune.gates(l0prune.gate(model, X, branches=True))
    is_open = torch.ones(bank.plan.size, dtype=torch.bool)
    for name, slots in closed.items():
        kind = "branch" if name in ("layers.0", "layers.1") else "neuron"
        axis = next(a for a in bank.plan.axes if a.name.startswith(name) and a.kind == kind)
        is_open[torch.arange(len(is_open))[axis.slice][slots]] = False
    bank.set_open(is_open)
    small = l0prune.export(model)
    assert small.rebuilt
    torch.testing.assert_close(small.module(X), model.eval()(X))
    return small


@pytest.mark.parametrize("between", [copy.deepcopy, through_pickle])
@pytest.mark.slow
def test_the_file_of_the_last_cut_fits_the_original(between, tmp_path):
    torch.manual_seed(0)
    model = randomise(Net()).eval()
    for number, closed in enumerate(ROUNDS):
        small = cut_again(model, closed)
        small.save_pretrained(tmp_path / str(number), code=True)
        model = between(small.module)
        with torch.no_grad():
            model.head.bias += 1  # as a training in between
    small = l0prune.export(l0prune.gate(model, X))
    small.save_pretrained(tmp_path / "last")
    assert small._manifest["layers"] == {
        **{f"layers.{at}": "Identity" for at in (0, 1)},
        **{f"layers.{at}.norm": "CutLayerNorm" for at in (0, 1, 2)},
    }
    for load in (l0prune.resize, cut_layers.resize):
        assert torch.equal(load(Net(), tmp_path / "last").eval()(X), model(X))
    third = l0prune.resize(Net(), tmp_path / "1")
    torch.testing.assert_close(l0prune.resize(third, tmp_path / "2").eval()(X) + 1, model(X))


@pytest.mark.slow
def test_a_loaded_model_is_cut_again(tmp_path):
    torch.manual_seed(0)
    cut_again(randomise(Net()).eval(), ROUNDS[0]).save(tmp_path / "first.pt")
    model = l0prune.resize(Net(), tmp_path / "first.pt").eval()
    small = cut_again(model, ROUNDS[1])
    small.save(tmp_path / "second.pt")
    assert torch.equal(l0prune.resize(Net(), tmp_path / "second.pt").eval()(X), small.module(X))


def test_a_model_that_was_changed_in_between_has_the_file_of_its_last_cut(tmp_path):
    torch.manual_seed(0)
    model = cut_again(randomise(Net()).eval(), ROUNDS[0]).module
    changed = copy.deepcopy(model)
    changed.head = nn.Linear(7, 5)
    small = cut_again(copy.deepcopy(changed), ROUNDS[1])
    small.save_pretrained(tmp_path / "second")
    with pytest.raises(FileError, match="does not fit a model of these sizes"):
        l0prune.resize(Net(), tmp_path / "second")
    assert torch.equal(l0prune.resize(changed, tmp_path / "second")(X), small.module(X))
