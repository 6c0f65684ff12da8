"""What of a network is in eight bits, as its graph says."""

import torch
from torch import nn

from l0prune.capture.capture import capture
from l0prune.features.int8.layers import quantized_layers

INFINITE = float("inf")
ANY, POSITIVE = (-INFINITE, INFINITE), (0.0, INFINITE)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()
        self.pool = nn.MaxPool2d(2)
        self.inner, self.its_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.side, self.twice = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.head, self.out = nn.Linear(16, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = self.pool(self.act(self.norm(self.stem(x))))
        x = self.its_norm(torch.relu(self.inner(x))) + self.side(x)
        x = self.twice(self.twice(x))
        return self.out(self.head(x.flatten(1)))


class Sum(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return torch.relu(x + self.branch(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.attend(x, x, x, need_weights=False)[0]
        return self.first(x) + self.second(x)


def found(model, *args):
    model.eval()
    return quantized_layers(capture(model, args), model)


def test_layers_read_the_grids_that_convolutions_write():
    scheme = found(Residual(), torch.randn(2, 1, 6, 6))
    layers = {layer.path: layer for layer in scheme.layers}
    assert [*layers] == ["stem", "inner", "side", "head", "out"]
    assert scheme.outputs == {"norm": 0, "inner": 1, "side": 2}
    assert scheme.bounds[:3] == ((0.0, 6.0), POSITIVE, ANY)
    assert layers["stem"].writes == 0
    assert layers["stem"].quantizes
    for name in ("inner", "side"):  # past an activation that the grid clips, and a pool
        assert (layers[name].reads, layers[name].quantizes) == (0, False)
    assert layers["head"].quantizes
    assert layers["out"].quantizes
    assert layers["head"].reads != layers["out"].reads
    assert all(bounds == ANY for bounds in scheme.bounds[3:])


def test_a_layer_that_another_module_computes_stays_as_it_is():
    scheme = found(Attention(), torch.randn(2, 3, 8))
    assert [layer.path for layer in scheme.layers] == ["first", "second"]
    first, second = scheme.layers
    assert first.reads == second.reads  # of one value
    assert scheme.outputs == {}


def test_a_module_that_a_container_holds_twice_stays_as_it_is():
    twice = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    scheme = found(nn.Sequential(twice, twice, nn.Linear(4, 4)), torch.randn(2, 4, 4, 4))
    assert [layer.path for layer in scheme.layers] == ["2"]


def test_sums_that_modules_return_are_on_the_grid_of_their_stream():
    stem, norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
    branches = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(4, 4)]
    model = nn.Sequential(stem, norm, nn.ReLU(), *map(Sum, branches), nn.Linear(4, 2))
    x = torch.randn(2, 1, 6, 6)
    scheme = found(model, x)
    layers = {layer.path: layer for layer in scheme.layers}
    stream = layers["0"].writes
    assert scheme.sums == {"3": stream, "4": stream}  # what a Linear writes is on no grid
    for name in ("3.branch", "4.branch"):
        assert (layers[name].reads, layers[name].quantizes) == (stream, False)
        assert layers[name].adds_to == stream
    assert (layers["5.branch"].reads, layers["5.branch"].quantizes) == (stream, False)
    assert layers["6"].quantizes
    assert quantized_layers(capture(model, (x,)), model, sums=False).sums == {}
    twice = nn.Sequential(stem, norm, nn.ReLU(), model[3], model[3])
    assert found(twice, x).sums == {}
