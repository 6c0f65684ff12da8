"""A stack of residual blocks on points, for what needs blocks that repeat."""

import torch
from small_task import CLASSES, FEATURES
from torch import nn


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


class Stack(nn.Module):
    """A first layer, blocks, a last layer."""

    def __init__(self, blocks=4, width=12):
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, points):
        return self.last(self.blocks(self.stem(points)))


def stack(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Stack(**kwargs)
