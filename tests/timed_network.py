"""A small gated network whose times are made up, or taken quickly."""

import torch
from torch import nn

import l0prune


class Small(nn.Module):
    """A residual stream, a depthwise convolution, a concatenation and a Linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(24, 40, 1)
        self.deep = nn.Conv2d(40, 40, 3, padding=1, groups=40)
        self.back = nn.Conv2d(40, 24, 1)
        self.side = nn.Conv2d(24, 10, 3, padding=1)
        self.norm = nn.BatchNorm2d(34)
        self.head = nn.Linear(34 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x + self.back(torch.relu(self.deep(torch.relu(self.wide(x)))))
        x = torch.relu(self.norm(torch.cat([x, torch.relu(self.side(x))], 1)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))


def gated(size=12):
    """The network with gates, all open."""
    torch.manual_seed(0)
    model = Small().eval()
    return l0prune.gate(model, (torch.randn(2, 3, size, size),))
