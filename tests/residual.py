"""A small residual network with gates, for those that choose which of its slots stay."""

import torch
from torch import nn

import l0prune


class Residual(nn.Module):
    """A stem, a residual block and a head: axes that hang together."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.inner, self.outer = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.outer(self.inner(x).relu())
        return self.head(x.mean((2, 3)))


def gated(scores=None, seed=0):
    torch.manual_seed(seed)
    model = l0prune.gate(Residual().eval(), torch.zeros(2, 3, 8, 8), branches=False)
    if scores is not None:
        with torch.no_grad():
            l0prune.gates(model).log_alpha.copy_(scores)
    return model


def random_scores(seed, size):
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


SIZE = l0prune.gates(gated()).plan.size
