"""Small networks with an axis that is averaged or normalised over, and the axes they should have.

Each case is as in ``networks.CASES``: module, input shape, sizes of the axes in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from networks import FLAT, IMAGE, TOKENS, Fn, conv
from torch import nn


def rms_by_hand(x, weight, eps=1e-2):
    """As most language models write it: in float32, and back."""
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype)


def centred(x):
    return x - x.mean(-1, keepdim=True)


def scaled(m, x):
    """A norm's own scale and shift."""
    return m.w * x + m.s


def layer_norm_by_moments(m, h):
    """As many vision models write it, with the mean of the squares."""
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return scaled(m, (h - mean) / torch.sqrt(variance + 1e-5))


def layer_norm_in_float32(m, h):
    """A sum by the width, in another dtype, and a mean that lost its dim."""
    x = h.to(torch.float32)
    d = x - x.mean(-1)[..., None]
    return scaled(m, (d * torch.rsqrt((d * d).sum(-1, keepdim=True) / 8 + 1e-5)).to(h.dtype))


def layer_norm_of_both(m, h):
    variance, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
    return scaled(m, (h - mean) * (variance + 1e-5).rsqrt())


def layer_norm_of_channels(m, x):
    """ConvNeXt's, over dim 1."""
    h = m.a(x)
    mean = h.mean(1, keepdim=True)
    h = (h - mean) / ((h - mean).pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
    return m.b(F.gelu(m.w[:, None, None] * h + m.s[:, None, None]))


def group_norm_by_hand(m, x):
    deviation, mean = torch.std_mean(h := m.a(x), (1, 2, 3), keepdim=True)
    return m.b((h - mean) / (deviation + 1e-3))


def norm_of_a_concat(m, x):
    h = torch.cat([m.a(x), m.c(x)], -1)
    return m.b(centred(h) / (h.var(-1, keepdim=True) + 0.01).sqrt())


def stream(norm, **layers):
    """A residual stream that everybody reads through the norm, with one branch."""

    def run(m, x):
        h = m.i(x)
        h = h + m.b(F.relu(m.a(norm(m, h))))
        return m.o(norm(m, h))

    ends = {"i": nn.Linear(32, 8), "o": nn.Linear(8, 3)}
    branch = {"a": nn.Linear(8, 6), "b": nn.Linear(6, 8, bias=False)}
    return Fn(run, **ends, **branch, **layers), TOKENS, {"i": 8, "a": 6, "i.in": 32}


def over_two_dims(norm):
    """A norm over both dims that a layer's outputs are divided into."""
    run = Fn(
        lambda m, x: m.o(m.n(m.i(x).unflatten(-1, (2, 4))).flatten(2)),
        i=nn.Linear(32, 8),
        n=norm,
        o=nn.Linear(8, 3),
    )
    return run, TOKENS, {"i": 2, "i#2": 4, "i.in": 32}


class LanguageModel(nn.Module):
    """A token table that writes the stream and, tied, reads it last."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 8)
        self.norm = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        h = self.table((x.abs() * 4).long() % 11) * 8**0.5
        h = h + self.b(F.silu(self.a(rms_by_hand(h, self.norm))))
        return self.head(rms_by_hand(h, self.norm))


def over_a_part(m, x):
    """The mean is over two axes one after another, and both halves are read on their own."""
    a, b = m.a(x), m.b(x)
    return (m.c(a) + m.d(b)) * torch.cat([a, b], 1).mean(1, keepdim=True)


def under_a_concat(m, x):
    """Two GroupNorms that see one axis in groups of 2 and of 4, in part after a concat."""
    a = m.a(x)
    return m.c(m.second(torch.cat([m.first(a), m.b(a)], 1)))


def affine():
    return {name: nn.Parameter(torch.rand(8)) for name in ("w", "s")}


def standardised(weight):
    deviation, mean = torch.std_mean(weight, (1, 2, 3), keepdim=True)
    return (weight - mean) / (deviation + 1e-5)


torch.manual_seed(0)  # the networks below are the same in every run
AVERAGES = {
    "mean_over_channels": (
        Fn(
            lambda m, x: m.b(h := m.a(x)) * torch.sigmoid(h.mean(1, keepdim=True)),
            a=conv(3, 8),
            b=conv(8, 2),
        ),
        IMAGE,
        {"a": 8},
    ),
    "mean_over_all": (
        Fn(
            lambda m, x: m.b(h := m.a(x)) * h.mean() + h.mean((1, 2, 3))[:, None, None, None],
            a=conv(3, 8),
            b=conv(8, 2),
        ),
        IMAGE,
        {"a": 8},
    ),
    "mean_over_a_flattened_map": (
        Fn(
            lambda m, x: m.b(h := m.a(x).flatten(1)) * h.mean(1, keepdim=True),
            a=conv(3, 8),
            b=nn.Linear(288, 2),
        ),
        IMAGE,
        {"a": 8, "b.in": 288},
    ),
    "mean_over_a_concat": (
        Fn(
            over_a_part,
            a=nn.Linear(10, 6),
            b=nn.Linear(10, 4),
            c=nn.Linear(6, 3),
            d=nn.Linear(4, 3),
        ),
        FLAT,
        {"a": 6, "b": 4, "a.in": 10, "b.in": 10},
    ),
    "mean_that_leaves_a_cut_dim": (
        Fn(
            lambda m, x: m.b(m.a(x)[:, None, :, None] * m.c(x)[:, None, None, :]).mean((1, 2)),
            a=nn.Linear(10, 6),
            c=nn.Linear(10, 4),
            b=nn.Linear(4, 3),
        ),
        FLAT,
        {"c": 4, "a.in": 10, "c.in": 10},
    ),
    "rms_norm": stream(lambda m, h: m.n(h), n=nn.RMSNorm(8, eps=1e-2)),
    "rms_norm_of_tiny_values": stream(lambda m, h: m.n(h * 1e-7), n=nn.RMSNorm(8)),
    "rms_norm_without_weight": stream(lambda m, h: F.rms_norm(h, (8,), None, 0.1)),
    "rms_norm_by_hand": stream(lambda m, h: rms_by_hand(h, m.w), w=nn.Parameter(torch.rand(8))),
    "rms_norm_over_two_dims": over_two_dims(nn.RMSNorm((2, 4), eps=1e-2)),
    "tied_table_and_head": (LanguageModel(), TOKENS, {"table": 8, "a": 6}),
    "normalised": stream(lambda m, h: F.normalize(h, dim=-1)),
    "norm_of_order_1": stream(lambda m, h: h / (1 + h.norm(p=1, dim=-1, keepdim=True))),
    "norm_of_order_infinity": stream(
        lambda m, h: h / (1 + torch.linalg.vector_norm(h, float("inf"), -1, keepdim=True))
    ),
    "norm_of_no_order": stream(lambda m, h: h / (1 + torch.linalg.norm(h, dim=-1, keepdim=True))),
    "group_norm": (
        nn.Sequential(
            conv(3, 12), nn.GroupNorm(4, 12), nn.ReLU(), conv(12, 8), nn.GroupNorm(8, 8), conv(8, 2)
        ),
        IMAGE,
        {"0.groups": 4, "3": 8},
    ),
    "group_norm_over_all": (
        nn.Sequential(conv(3, 12), nn.GroupNorm(1, 12, eps=1e-2), nn.ReLU(), conv(12, 2)),
        IMAGE,
        {"0": 12},
    ),
    "group_norm_over_all_of_a_stream": stream(
        lambda m, h: F.group_norm(h.mT, 1, None, m.w).mT, w=nn.Parameter(torch.rand(8))
    ),
    "layer_norm_over_two_dims": over_two_dims(nn.LayerNorm((2, 4), eps=1e-2)),
    "layer_norm_over_channels_and_positions": (
        nn.Sequential(conv(3, 8), nn.LayerNorm((8, 6, 6)), nn.ReLU(), conv(8, 2)),
        IMAGE,
        {"0": 8},
    ),
    "layer_norm_by_variance": stream(
        lambda m, h: scaled(m, centred(h) / (h.var(-1, False, keepdim=True) + 1e-5).sqrt()),
        **affine(),
    ),
    "layer_norm_by_deviation": stream(
        lambda m, h: scaled(m, centred(h) / (h.std(-1, keepdim=True) + 1e-3)), **affine()
    ),
    "layer_norm_by_moments": stream(layer_norm_by_moments, **affine()),
    "layer_norm_in_float32": stream(layer_norm_in_float32, **affine()),
    "layer_norm_of_both": stream(layer_norm_of_both, **affine()),
    "layer_norm_of_channels": (
        Fn(layer_norm_of_channels, a=conv(3, 8), b=conv(8, 2), **affine()),
        IMAGE,
        {"a": 8},
    ),
    "group_norm_by_hand": (
        Fn(group_norm_by_hand, a=conv(3, 8), b=conv(8, 2)),
        IMAGE,
        {"a": 8},
    ),
    "norm_of_a_concat": (
        Fn(norm_of_a_concat, a=nn.Linear(10, 6), c=nn.Linear(10, 4), b=nn.Linear(10, 3)),
        FLAT,
        {"a": 6, "c": 4, "a.in": 10, "c.in": 10},
    ),
    "mean_of_what_is_never_zero": stream(lambda m, h: h * h.sigmoid().mean(-1, keepdim=True)),
    "softmax_by_hand": stream(lambda m, h: h.exp() / h.exp().sum(-1, keepdim=True)),
    "standardised_by_hand": (
        Fn(
            lambda m, x: m.c(F.conv2d(F.relu(m.a(x)), standardised(m.b.weight)).relu()),
            a=conv(3, 8),
            b=conv(8, 6),
            c=conv(6, 2),
        ),
        IMAGE,
        {"a": 8, "b": 6},
    ),
    "group_norms_of_several_sizes": (
        Fn(
            under_a_concat,
            a=conv(3, 12),
            first=nn.GroupNorm(6, 12),
            b=conv(12, 12),
            second=nn.GroupNorm(6, 24, affine=False),
            c=conv(24, 2),
        ),
        IMAGE,
        {"a.groups": 3, "b.groups": 3},
    ),
}
