"""Dynamic convolutions, written in the ways in which libraries write them."""

import torch
import torch.nn.functional as F
from torch import nn


class Dynamic(nn.Module):
    """A dynamic convolution: a few kernels, and attention that says how much of each."""

    def __init__(self, inputs, outputs, kernels, normalised, bias, way):
        super().__init__()
        self.attention = nn.Linear(inputs, kernels)
        self.weight = nn.Parameter(torch.randn(kernels, outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.randn(kernels, outputs)) if bias else None
        self.normalised, self.way = normalised, way

    def forward(self, x):
        shares = self.attention(x.mean((2, 3)))
        shares = shares.softmax(1) if self.normalised else shares.sigmoid()
        bias = None if self.bias is None else shares @ self.bias
        b, (k, o, i) = x.shape[0], self.weight.shape[:3]
        if self.way == "product":
            weight = torch.mm(shares, self.weight.view(k, -1)).view(b * o, i, 3, 3)
        else:
            weight = torch.einsum("bk,koihw->boihw", shares, self.weight)
        if self.way == "loop":
            return torch.cat([
                F.conv2d(x[n : n + 1], weight[n], None if bias is None else bias[n], padding=1)
                for n in range(b)
            ])  # fmt: skip
        y = F.conv2d(
            x.reshape(1, b * i, *x.shape[2:]),
            weight.reshape(b * o, i, 3, 3),
            None if bias is None else bias.reshape(-1),
            padding=1,
            groups=b,
        )
        return y.view(b, o, *y.shape[2:])
