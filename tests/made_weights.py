"""Small networks whose forward makes weights: of several parameters, or anew for each input.

Each case is as in ``networks.CASES``: module, input shape, sizes of the axes in order.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from networks import FLAT, IMAGE, Fn, conv
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


def between(middle, shape=FLAT, **layers):
    """A Linear or convolution, what is tried, and a reader; nothing in it keeps zeros."""
    first, last = (nn.Linear, nn.Linear) if shape == FLAT else (conv, conv)
    run = lambda m, x: m.o(torch.sigmoid(middle(m, torch.sigmoid(m.a(x)))))  # noqa: E731
    return Fn(run, a=first(shape[1], 8), o=last(6, 3), **layers)


def mixed(m, x):
    """Two weights, and a number that says how much of each."""
    return F.linear(x, m.share * m.u + (1 - m.share) * m.v, m.bias)


def kernels_in_shares(m, x):
    """A dynamic convolution: attention says how much of each kernel, a group is an example."""
    shares = m.route(x.mean((2, 3))).softmax(1)
    weight = (shares @ m.w.view(4, -1)).view(-1, 8, 3, 3)
    bias = (shares @ m.bias).view(-1)
    y = F.conv2d(x.reshape(1, -1, *x.shape[2:]), weight, bias, padding=1, groups=len(x))
    return y.view(len(x), -1, *y.shape[2:])


def kernels_one_by_one(m, x):
    """The same, an example at a time."""
    shares = m.route(x.mean((2, 3))).softmax(1)
    weights = torch.einsum("bk,koihw->boihw", shares, m.w)
    return torch.cat([F.conv2d(x[i : i + 1], weights[i], padding=1) for i in range(len(x))])


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


def normed_stream(norm):
    """A vocoder's residual blocks of one square weight each; its reader is normed, too."""
    blocks = nn.ModuleList(norm(nn.Conv1d(8, 8, 3, padding=1)) for _ in range(2))

    def run(m, x):
        x = m.a(x)
        for block in m.blocks:
            x = x + block(F.leaky_relu(x, 0.1))
        return torch.tanh(m.o(F.leaky_relu(x)))

    return Fn(run, a=nn.Conv1d(6, 8, 3), blocks=blocks, o=norm(nn.Conv1d(8, 2, 3)))


@torch.no_grad()
def norm_with_hooks(layer, **settings):
    """The old way; torch copies such a layer only where its weight has no gradient."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(layer, **settings)


def one_norm(norm):
    """A scale of a whole weight, of which rows and columns go."""
    return nn.Sequential(
        nn.Linear(10, 8), nn.ReLU(), norm(nn.Linear(8, 6), dim=None), nn.ReLU(), nn.Linear(6, 3)
    )


@torch.no_grad()
def spectral_norm_with_hooks(layer):
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.spectral_norm(layer)


def spectral_block(norm):
    """A branch of two such layers beside a stream, as in discriminators."""
    return Fn(
        lambda m, x: m.o((y := m.i(x)) + m.b(F.relu(m.a(y)))),
        i=nn.Linear(10, 8),
        a=norm(nn.Linear(8, 6)),
        b=norm(nn.Linear(6, 8)),
        o=nn.Linear(8, 3),
    )


class Decomposed(nn.Module):
    """DoRA's layer: rows of W + BA are normed and scaled; what BA is, an identity shows."""

    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        self.magnitude = nn.Parameter(torch.rand(outputs) + 0.5)

    def forward(self, x):
        change = self.b(self.a(torch.eye(self.a.in_features, dtype=x.dtype))).T
        norms = torch.linalg.norm(self.base.weight + 2 * change, dim=1).detach()
        scale = (self.magnitude / norms).view(1, -1)
        y = self.base(x)
        return y + (scale - 1) * (y - self.base.bias) + scale * self.b(self.a(x)) * 2


def smoothed(m, x):
    """One stored filter for all channels: stretched over them, as anti-aliasing does it."""
    y = F.relu(m.a(x))
    y = F.conv2d(y, m.f.expand(y.shape[1], 1, -1, -1), groups=y.shape[1])
    y = F.conv2d(torch.sigmoid(y), m.f.repeat(8, 1, 1, 1) * 2, groups=8, padding=1)
    y = F.conv_transpose2d(y, m.f.tile(8, 1, 1, 1), stride=2, groups=8)
    return m.b(F.conv2d(y, m.f.repeat_interleave(8, 0), groups=8)).mean((2, 3))


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
        {"a": 8, "kernels": 4, "w": 6},
    ),
    "kernels_in_shares": (
        between(
            kernels_in_shares,
            IMAGE,
            route=nn.Linear(8, 4),
            w=nn.Parameter(torch.randn(4, 6, 8, 3, 3)),
            bias=nn.Parameter(torch.randn(4, 6)),
        ),
        IMAGE,
        {"a": 8, "kernels": 4, "bias": 6},
    ),
    "kernels_in_shares_one_by_one": (
        between(
            kernels_one_by_one,
            IMAGE,
            route=nn.Linear(8, 4),
            w=nn.Parameter(torch.randn(4, 6, 8, 3, 3)),
        ),
        IMAGE,
        {"a": 8, "kernels": 4, "w": 6},
    ),
    "experts_of_matrices": (
        between(experts_of_matrices, route=nn.Linear(8, 4), w=nn.Parameter(torch.randn(4, 6, 8))),
        FLAT,
        {},
    ),
    "weight_normed_stream": (normed_stream(weight_norm), (2, 6, 12), {"a": 8}),
    "weight_normed_stream_with_hooks": (normed_stream(norm_with_hooks), (2, 6, 12), {"a": 8}),
    "one_norm_of_a_weight": (
        one_norm(weight_norm),
        FLAT,
        {"0": 8, "2.parametrizations.weight.original1": 6, "0.in": 10},
    ),
    "one_norm_of_a_weight_with_hooks": (
        one_norm(norm_with_hooks),
        FLAT,
        {"0": 8, "2.weight_v": 6, "0.in": 10},
    ),
    "spectral_block": (
        spectral_block(spectral_norm),
        FLAT,
        {"i": 8, "a.parametrizations.weight.original": 6, "i.in": 10},
    ),
    "spectral_block_with_hooks": (
        spectral_block(spectral_norm_with_hooks),
        FLAT,
        {"i": 8, "a.weight_orig": 6, "i.in": 10},
    ),
    "decomposed_layers": (
        nn.Sequential(
            Decomposed(10, 8), nn.ReLU(), Decomposed(8, 6), nn.Sigmoid(), nn.Linear(6, 3)
        ),
        FLAT,
        {"0.b": 8, "0.a": 4, "2.b": 6, "2.a": 4},
    ),
    "one_filter_for_all_channels": (
        Fn(smoothed, a=conv(3, 8), f=torch.rand(1, 1, 3, 3), b=conv(8, 2)),
        IMAGE,
        {"a": 8},
    ),
}
