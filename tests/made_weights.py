"""Small networks whose forward makes weights: of several parameters, or anew for each input.

Each case is as in ``networks.CASES``: module, input shape, sizes of the axes in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from networks import FLAT, IMAGE, Fn, conv
from torch import nn


def between(middle, shape=FLAT, **layers):
    """A Linear or convolution, what is tried, and a reader; nothing in it keeps zeros."""
    first, last = (nn.Linear, nn.Linear) if shape == FLAT else (conv, conv)
    run = lambda m, x: m.o(torch.sigmoid(middle(m, torch.sigmoid(m.a(x)))))  # noqa: E731
    return Fn(run, a=first(shape[1], 8), o=last(6, 3), **layers)


def mixed(m, x):
    """Two weights, and a number that says how much of each."""
    return F.linear(x, m.share * m.u + (1 - m.share) * m.v, m.bias)


def low_rank(m, x):
    """What LoRA's layers do once merged."""
    return F.linear(x, m.w + 0.5 * m.up @ m.down)


def fused(weight, norm):
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale


def two_branches_as_one(m, x):
    """RepVGG's block, fused in forward: BatchNorms folded, the small kernel padded."""
    (big, one), (small, two) = fused(m.k3.weight, m.n3), fused(m.k1.weight, m.n1)
    return F.conv2d(x, big + F.pad(small, [1, 1, 1, 1]), one + two, padding=1)


def experts_of_kernels(m, x):
    """CondConv: each example mixes its own kernel."""
    b, c, h, w = x.shape
    share = torch.sigmoid(m.route(x.mean((2, 3))))
    kernel = (share @ m.w.view(4, -1)).view(b * 6, c, 3, 3)
    y = F.conv2d(x.reshape(1, b * c, h, w), kernel, padding=1, groups=b)
    return y.view(b, 6, h, w)


def experts_of_matrices(m, x):
    kernel = torch.einsum("be,eoi->boi", m.route(x).softmax(-1), m.w)
    return torch.bmm(kernel, x[:, :, None]).squeeze(-1)


torch.manual_seed(0)  # the networks below are the same in every run
MADE_WEIGHTS = {
    "mixed_weights": (
        between(
            mixed,
            u=nn.Parameter(torch.randn(6, 8)),
            v=nn.Parameter(torch.randn(6, 8)),
            bias=nn.Parameter(torch.randn(6)),
            share=nn.Parameter(torch.rand(())),
        ),
        FLAT,
        {"a": 8, "u": 6, "a.in": 10},
    ),
    "weight_and_one_of_low_rank": (
        between(
            low_rank,
            w=nn.Parameter(torch.randn(6, 8)),
            up=nn.Parameter(torch.randn(6, 4)),
            down=nn.Parameter(torch.randn(4, 8)),
        ),
        FLAT,
        {"a": 8, "up": 4, "up#2": 6, "a.in": 10},
    ),
    "branches_fused_in_forward": (
        between(
            two_branches_as_one,
            IMAGE,
            k3=conv(8, 6, bias=False),
            k1=conv(8, 6, 1, bias=False),
            n3=nn.BatchNorm2d(6),
            n1=nn.BatchNorm2d(6),
        ),
        IMAGE,
        {"a": 8, "k3": 6},
    ),
    "experts_of_kernels": (
        between(
            experts_of_kernels,
            IMAGE,
            route=nn.Linear(8, 4),
            w=nn.Parameter(torch.randn(4, 6, 8, 3, 3)),
        ),
        IMAGE,
        {"a": 8, "route": 4, "w": 6},
    ),
    "experts_of_matrices": (
        between(experts_of_matrices, route=nn.Linear(8, 4), w=nn.Parameter(torch.randn(4, 6, 8))),
        FLAT,
        {},
    ),
}
