"""Networks with branches, in a module that needs torch alone: those of pickles load with it."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block whose code adds in place, to fewer positions and to more channels."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 8, 3, stride, 1)
        self.conv2 = nn.Conv2d(8, outputs, 3, padding=1)
        changes = stride > 1 or inputs != outputs
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        y = self.conv2(F.relu(self.conv1(x)))
        y += self.short(x)
        return F.relu(y)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(10, 4)
        self.blocks = nn.Sequential(Block(6, 6, 1), Block(6, 10, 2), Block(10, 10, 1))

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    """Returns its weights, too, and is called by keyword, as those of transformers are."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, states, mask=None, **options):
        q, k, v = self.qkv(states).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(8), nn.LayerNorm(8), Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, states, mask=None, *, scale=1.0):
        mixed, _ = self.attention(mask=mask, states=self.norm1(states))
        states = states + mixed * scale
        return states + self.mlp(self.norm2(states))


class Transformer(nn.Module):
    """Layers in a list, which take more than the stream."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, None, scale=1.0)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def in_a_row():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Residual(), Residual(), nn.Linear(6, 3))


class Concatenated(nn.Module):
    """Two paths side by side, one of a list of tensors."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = (nn.Linear(n, 6) for n in (5, 6, 6))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head(F.relu(torch.cat((self.first(x), self.second(x)), -1)))


class Sum(nn.Module):
    """What the last of several tensors becomes."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, before):
        return self.outer(F.relu(self.inner(before[0] + before[1])))


class OfLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.other, self.head = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)
        self.sum = Sum()

    def forward(self, x):
        first, other = F.relu(self.stem(x)), F.relu(self.other(x))
        return self.head(first + other + self.sum([first, other]))


IMAGE, ROWS, TEXT = torch.ones(2, 3, 8, 8), torch.ones(2, 5), torch.ones(2, 4, 5)
# Of each network an input, and the branches that are closed.
NETWORKS = {
    "convolutional": (Convolutional, IMAGE, ("blocks.1", "blocks.2")),
    "transformer": (
        Transformer,
        TEXT,
        ("layers.0.attention", "layers.1.mlp", "layers.2.attention", "layers.2.mlp"),
    ),
    "sequential": (in_a_row, ROWS, ("2", "3")),
    "concatenated": (Concatenated, ROWS, ("first.branch",)),
    "of_lists": (OfLists, ROWS, ("sum",)),
}
