"""Networks with input gates that say something, for those that look at what comes of it."""

import copy
import functools

import torch
from stacks import stack
from torch import nn

import l0prune

POINTS = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(4))


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width, inner):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.second, self.last = nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.last(self.second(self.norm(self.first(x)).relu()))


def convolutions():
    torch.manual_seed(1)
    blocks = [Block(4, 6) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(256, 3))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight), nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def said(network, spread=0.2, seed=0):
    """The network, whose gates are open for some inputs and closed for others."""
    generator = torch.Generator().manual_seed(seed)
    for gate in network.gates:
        for layer in (*gate.axes, *([] if gate.whole is None else [gate.whole])):
            with torch.no_grad():
                layer.weight.normal_(0, spread, generator=generator)
                layer.bias.normal_(0, spread / 2, generator=generator)
    return network


@functools.cache
def made(build, **kwargs):
    """One of which all are copies: to find the blocks takes longer than all else."""
    x = IMAGES if build is convolutions else POINTS
    return said(l0prune.add_input_gates(build().eval(), (x,), **kwargs))


def points(**kwargs):
    return copy.deepcopy(made(stack, **kwargs))


def images(**kwargs):
    return copy.deepcopy(made(convolutions, **kwargs))
