"""Small models that several tests share."""

from torch import nn


class Broken(nn.Module):
    """Capture of the whole stops at a branch on values, between its children."""

    def forward(self, x):
        for layer in self.layers():
            x = layer(x)
        return x * 2 if x.sum().item() > 1e9 else x


def small(out=4):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, out))
