"""Networks of which whole branches may go, and gates that close those named."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import l0prune

X = torch.randn(2, 3, 8, 8)


class Block(nn.Module):
    """Two convolutions beside a shortcut, as He et al. write it, in place where ``writes``."""

    def __init__(self, inputs=8, outputs=8, stride=1, writes=False):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 12, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(12), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(12, outputs, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=writes)
        changes = stride > 1 or inputs != outputs
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if changes else None
        self.writes = writes

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x = x if self.short is None else self.short(x)
        if self.writes:
            y += x
            return self.relu(y)
        return F.relu(x + y)


class Net(nn.Module):
    def __init__(self, writes=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(writes=writes), Block(8, 16, 2, writes), Block(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Layer(nn.Module):
    """Of a DenseNet: it reads all that there is, and gives a little more."""

    def __init__(self, reads, gives):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(reads), nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(reads, 6, 1, bias=False)
        self.conv2 = nn.Conv2d(6, gives, 3, padding=1, bias=False)

    def forward(self, parts):
        y = self.conv1(F.relu(self.norm1(torch.cat(parts, 1))))
        return self.conv2(F.relu(self.norm2(y)))


class Dense(nn.Module):
    """Layers that read each other, two paths side by side, and a norm over all."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.layers = nn.ModuleList(Layer(5 + 4 * i, 4) for i in range(3))
        self.wide, self.small = nn.Conv2d(17, 6, 3, padding=1), nn.Conv2d(17, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(10), nn.Linear(10, 4)

    def forward(self, x):
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(parts))
        x = F.relu(torch.cat(parts, 1))
        x = torch.cat((self.wide(x), F.avg_pool2d(self.small(x), 3, 1, 1)), dim=1)
        return self.head(F.relu_(self.norm(x)).mean((2, 3)))


def randomised(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.2 if tensor.ndim == 1
                             else torch.randn(tensor.shape) * 0.3)  # fmt: skip
    return model.eval()


def gated(model, *closed, x=X, **kwargs):
    """With a switch on every branch, those named closed, and a third of all slots."""
    model = l0prune.gate(randomised(model), *([x] if not kwargs else [(), kwargs]), branches=True)
    gates = l0prune.gates(model)
    open_ = torch.rand(gates.plan.size, generator=torch.Generator().manual_seed(0)) > 0.33
    for axis in gates.plan.axes:
        if axis.kind == "branch":
            open_[axis.start] = axis.name not in closed
    gates.set_open(open_)
    return model


def branches_of(model):
    return [axis.name for axis in l0prune.gates(model).axes if axis.kind == "branch"]
