"""Small models that several tests share."""

from torch import nn


class Broken(nn.Module):
    """Capture of the whole stops at a branch on values, between its children."""

    def forward(self, x):
        for layer in self.layers():
            x = layer(x)
        return x * 2 if x.sum().item() > 1e9 else x


class Tied(nn.Module):
    """A token table that writes a stream and, tied to it, the head that reads it."""

    def __init__(self, mix=True, bias=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 12), nn.Linear(12, 20, bias=bias)
        self.head.weight = self.embed.weight
        self.mix = nn.Linear(12, 12) if mix else None

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h.tanh() if self.mix is None else h + self.mix(h).relu())


def small(out=4):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, out))
