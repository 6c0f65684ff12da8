"""Small networks of every kind, with the axes that they should be found to have."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class ByWidth(nn.Module):
    """A class that computes with its width, so that what is handed out of it is a graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h / h.shape[-1])


class Fn(nn.Module):
    """Named layers and a function that uses them, which its pickles know within this process."""

    runs: ClassVar[dict[int, Callable]] = {}

    def __getstate__(self):
        self.runs[id(self.run)] = self.run
        return {**vars(self), "run": id(self.run)}

    def __setstate__(self, state):
        super().__setstate__({**state, "run": self.runs[state["run"]]})

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            if isinstance(layer, nn.Parameter):
                self.register_parameter(name, layer)
            elif isinstance(layer, torch.Tensor):
                self.register_buffer(name, layer)
            else:
                self.add_module(name, layer)

    def forward(self, *args):
        return self.run(self, *args)


class ReadsItsInput(nn.Module):
    """Attention as in the first vision transformers: C is the stream's size, and that of heads."""

    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


def conv(i, o, k=3, **kw):
    return nn.Conv2d(i, o, k, padding=k // 2, **kw)


def attend(m, x, heads=4, kv=None):
    b, t, _ = x.shape
    kv = kv or heads
    q = m.q(x).view(b, t, heads, -1).transpose(1, 2)
    k = m.k(x).view(b, t, kv, -1).transpose(1, 2)
    v = m.v(x).view(b, t, kv, -1).transpose(1, 2)
    if hasattr(m, "frequency"):
        q, k = rotary(q, m.frequency), rotary(k, m.frequency)
    if kv != heads:
        k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    y = F.scaled_dot_product_attention(q, k, v)
    return m.o(y.transpose(1, 2).reshape(b, t, -1))


def rotary(x, frequency):
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def by_letters(m, x):
    """An ellipsis, one that is broadcast, and an output that nobody names."""
    x = torch.einsum("...i,oi->...o", x, m.a).relu()
    x = torch.einsum("...c, c... -> c...", x, m.scale[:, None, None])
    return torch.einsum("cbt,kc", x, m.b)


def messages(m, x):
    """A layer of a graph network by hand: every token sends something to the one before it."""
    sent = m.a(x[0])
    to = torch.arange(len(sent)).roll(1)
    return m.b(torch.zeros_like(sent).index_add(0, to, sent.relu()))[None]


def with_spectral_norm(m, x):
    sigma = torch.dot(m.u, torch.mv(m.w, m.v))
    return m.b(F.linear(m.a(x), m.w / sigma).relu())


def with_positions(m, x):
    x = m.a(x)
    return m.b(m.attention(x + m.p, x + m.p, x, need_weights=False)[0])


def pieces(m, x):
    one, two, three = m.rows.chunk(3)
    left, right = m.columns[:, :8], m.columns[:, 8:]
    product = F.linear(F.linear(x, one) * F.linear(x, two), left)
    return m.b(product + F.linear(F.linear(x, three).relu(), right))


def by_hand(m, x):
    b, t, _ = x.shape
    qkv = m.qkv(x).reshape(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    a = (q @ k.transpose(-2, -1) * (8**-0.5)).softmax(-1)
    return m.o((a @ v).transpose(1, 2).flatten(2))


def pooled_heads(m, x):
    """Heads beside the batch, each convolved and normalised on its own, as in MViT."""
    b, t, _ = x.shape
    q, k, v = m.qkv(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 4, 1).unbind(0)
    k, v = (
        m.norm(m.pool(y.reshape(b * 4, 8, t)).reshape(b, 4, 8, -1).transpose(2, 3)) for y in (k, v)
    )
    return m.o(F.scaled_dot_product_attention(q.transpose(2, 3), k, v).transpose(1, 2).flatten(2))


def across_channels(m, x):
    """Attention of channels to channels, normalised over tokens: k's and v's stay, not q's."""
    q, k, v = (layer(x).unflatten(-1, (4, 8)).permute(0, 2, 3, 1) for layer in (m.q, m.k, m.v))
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * m.heat
    return m.o((scores.softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


def written_in_place(m, x):
    """Heads with a part of them overwritten in place, as MViT adds to all but its class token."""
    y = m.a(x).unflatten(-1, (4, 8)).transpose(1, 2).clone()
    y[:, :, 1:] += m.b(x).unflatten(-1, (4, 8)).transpose(1, 2)[:, :, 1:]
    y[:, :, :1] = y[:, :, 1:2]
    return m.o(y.transpose(1, 2).flatten(2))


def windows(m, x):
    """Sliding windows in both ways, over positions that channels pass."""
    y = m.a(x)
    z = F.fold(F.unfold(y, 2, stride=2), y.shape[-2:], 2, stride=2)
    columns = F.unfold(y, 3, padding=1).unflatten(1, (8, 9)).sum(2)
    strips = z.unfold(2, 2, 2).unfold(3, 3, 3).amax((-1, -2))
    return m.b(z + columns.unflatten(-1, (6, 6))).mean((2, 3)) + m.c(strips).mean((2, 3))


def channel_shuffle(m, x):
    x = m.a(x)
    b, c, h, w = x.shape
    x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
    return m.b(x).mean((2, 3))


def squeeze_excite(m, x):
    x = F.relu(m.a(x))
    s = torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True)))))
    return m.b(x * s).mean((2, 3))


def merged_heads(m, x):
    """As BLOOM, DeBERTa and T5 write it: heads merged into the batch."""
    q, k, v = (f(x).view(2, 5, 4, 8).transpose(1, 2).reshape(8, 5, 8) for f in (m.q, m.k, m.v))
    scores = torch.baddbmm(x.new_ones(8, 1, 5), q, k.transpose(1, 2), beta=0.5)
    return m.o((scores.softmax(2) @ v).view(2, 4, 5, 8).transpose(1, 2).reshape(2, 5, 32))


def alibi(m, x):
    """A slope for each head, made in forward."""
    q, k, v = (f(x).view(2, 5, 4, 8).transpose(1, 2) for f in (m.q, m.k, m.v))
    slopes = 0.25 ** torch.arange(1, 5, device=x.device)
    bias = slopes[:, None, None] * torch.arange(5, device=x.device)
    weights = (q @ k.transpose(2, 3) + bias.to(x.dtype)).softmax(3)
    return m.o((weights @ v).transpose(1, 2).flatten(2))


def heads_by_letters(m, x):
    q, k, v = (f(x).view(2, 5, 4, 8) for f in (m.q, m.k, m.v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(3)
    return m.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


def one_group_for_all_heads(m, x):
    """As in Mamba-2: what is one for all heads has a dim of one, which the letters stretch."""
    b, t, _ = x.shape
    y, k, q = m.a(x).split([12, 6, 6], -1)
    y, k, q = y.reshape(b, t, 4, 3), k.reshape(b, t, 1, 6), q.reshape(b, t, 1, 6)
    y = torch.einsum("bthp,bthn->bthnp", y, k)
    return m.b(torch.einsum("bthn,bthnp->bthp", q, y).reshape(b, t, 12))


def cast_as_another(m, x):
    """The rows of two matrices in one, in the dtype of what they are multiplied with."""
    x = m.a(x)
    return m.b(F.linear(x, m.w.flatten(0, 1).type_as(x)).relu())


def of_each_example(m, x):
    """A function of one example, and in it one of each token, made ones of all."""
    y = m.a(x)
    y = torch.vmap(lambda one: one.relu() * one.sigmoid().mean(0))(y)
    return m.b(torch.vmap(torch.vmap(lambda t, s: t * s, (0, None)), (0, 0))(y, y[:, 0]))


def with_a_tangent(m, x):
    y, slope = torch.func.jvp(torch.sigmoid, (m.a(x),), (m.c(x),))
    return m.b(y + slope)


def deformed(m, x):
    import torchvision  # slow to load

    y = m.a(x)
    z = torchvision.ops.deform_conv2d(
        y, m.where(y), m.w, m.bias, padding=1, mask=m.much(y).sigmoid()
    )
    return m.b(z.relu())


def shares_of_groups(m, x):
    """Two shares for each token, one of which each slot of its group takes; and one for all."""
    y = m.a(x).relu()
    shares = m.s(x).repeat_interleave(y.shape[-1], -1)
    y = (torch.stack([y, y.flip(1)], 2).flatten(2) * shares).view(*y.shape[:2], 2, -1).sum(2)
    return m.b(y * m.all(x).expand(-1, -1, y.shape[-1]))


def keys_of_groups(m, x):
    """Heads of queries share keys and values, which are copied for them: copies are no axis."""
    q = m.q(x).view(2, 5, 4, 8).transpose(1, 2)
    k, v = (each(x).view(2, 5, 2, 8).transpose(1, 2) for each in (m.k, m.v))
    k = k[:, :, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8)
    y = (q @ k.mT).softmax(-1) @ v.repeat_interleave(2, 1)
    return m.o(y.transpose(1, 2).flatten(2))


def heads_over_edges(m, x):
    """Attention over the edges of a ring: each place looks at itself and at the one before."""
    rows, to = x.flatten(0, 1), torch.arange(10).repeat(2)
    of = torch.cat([torch.arange(10), torch.arange(10).roll(1)])
    q, k, v = (each(rows).view(10, 4, 8) for each in (m.q, m.k, m.v))
    e = (q[to] * k[of]).sum(-1).sigmoid()
    y = torch.zeros(10, 4, 8, dtype=x.dtype).index_add(0, to, e[..., None] * v[of])
    return m.o(y.flatten(1)).view(2, 5, -1)


def unpadded(m, x):
    """Tokens of padding are taken out by their positions, and zeros put in their place."""
    rows = x.flatten(0, 1)
    index = (rows[:, 0] > 0).nonzero().flatten()
    y = m.b(m.a(rows[index]).relu())
    return m.c(torch.zeros(10, 8, dtype=x.dtype).index_put((index,), y).view(2, 5, 8))


def masked(m, x):
    """Tokens chosen by a mask are changed and added to their places, others stay."""
    y, mask = m.a(x), x[..., 0] > 0
    y = y.clone()
    y[mask] = y[mask] + m.c(m.b(y[mask]).relu())
    return m.d(y)


def deformed_in_groups(m, x):
    import torchvision

    return m.b(torchvision.ops.deform_conv2d(m.a(x), m.where(x), m.w, padding=1).relu())


IMAGE, FLAT, TOKENS = (2, 3, 6, 6), (2, 10), (2, 5, 32)
STEPS = (2, 3, 32)  # of a recurrent layer
qkv = {n: nn.Linear(32, 32) for n in "qkvo"}
inputs = {f"{n}.in": 32 for n in "qkv"}


def attention(run):
    """Of four heads of eight dims, with separate projections."""
    return Fn(run, **qkv), TOKENS, {"q.heads": 4, "q.head_dim": 8, "v.head_dim": 8, **inputs}


torch.manual_seed(0)  # the networks below are the same in every run
CASES = {
    # name: (module, input shape, sizes of the axes in order)
    "mlp": (
        nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)),
        FLAT,
        {"0": 8, "2": 6, "0.in": 10},
    ),
    "sigmoid_after_bn": (
        nn.Sequential(
            conv(3, 8), nn.BatchNorm2d(8), nn.Sigmoid(), conv(8, 4), nn.Flatten(), nn.Linear(144, 3)
        ),
        IMAGE,
        {"0": 8, "3": 4, "5.in": 144},
    ),
    "residual": (
        Fn(lambda m, x: m.c((y := m.a(x)) + m.b(y)), a=conv(3, 8), b=conv(8, 8), c=conv(8, 2)),
        IMAGE,
        {"a": 8},
    ),
    "concat": (
        Fn(
            lambda m, x: m.c(torch.cat([F.relu(m.a(x)), m.b(x)], 1)),
            a=conv(3, 5),
            b=conv(3, 7),
            c=conv(12, 2),
        ),
        IMAGE,
        {"a": 5, "b": 7},
    ),
    "concat_with_image": (
        Fn(lambda m, x: m.b(torch.cat([x, m.a(x)], 1)), a=conv(3, 5), b=conv(8, 2)),
        IMAGE,
        {"a": 5},
    ),
    "grouped": (
        nn.Sequential(conv(3, 12), nn.ReLU(), conv(12, 18, groups=3), nn.ReLU(), conv(18, 2)),
        IMAGE,
        {"0.groups": 3, "0": 4, "2": 6},
    ),
    "depthwise": (
        nn.Sequential(conv(3, 8), conv(8, 8, groups=8), nn.ReLU6(), conv(8, 2)),
        IMAGE,
        {"0": 8},
    ),
    "depth_multiplier": (
        nn.Sequential(conv(3, 8), conv(8, 24, groups=8), nn.ReLU(), conv(24, 2)),
        IMAGE,
        {"0.groups": 8, "1": 3},
    ),
    "transposed_conv": (
        nn.Sequential(conv(3, 8), nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ReLU(), conv(6, 2)),
        IMAGE,
        {"0": 8, "1": 6},
    ),
    "kernel_of_one_over_positions": (
        Fn(
            lambda m, x: m.o((y := m.u(x)) * m.s(m.t(y).relu()).sigmoid()),
            u=nn.Linear(32, 8),
            t=nn.Conv1d(5, 7, 1),
            s=nn.ConvTranspose1d(7, 5, 1),
            o=nn.Linear(8, 3),
        ),
        TOKENS,
        {"u": 8, "t": 7, "u.in": 32},
    ),
    "diagonal": (
        Fn(
            lambda m, x: m.c(torch.diagonal(m.a(x).relu().mT @ m.b(x), dim1=-1, dim2=-2)),
            a=nn.Linear(32, 8),
            b=nn.Linear(32, 8),
            c=nn.Linear(8, 3),
        ),
        TOKENS,
        {"a.head_dim": 8, "a.in": 32, "b.in": 32},
    ),
    "diagonal_made": (
        Fn(lambda m, x: m.b(torch.diag_embed(m.a(x))), a=nn.Linear(32, 8), b=nn.Linear(8, 3)),
        TOKENS,
        {"a": 8, "a.in": 32},
    ),
    "shares_of_groups": (
        Fn(
            shares_of_groups,
            a=nn.Linear(32, 8),
            s=nn.Linear(32, 2),
            all=nn.Linear(32, 1),
            b=nn.Linear(8, 3),
        ),
        TOKENS,
        {"a": 8, "a.in": 32, "s.in": 32, "all.in": 32},
    ),
    "keys_of_groups": (
        Fn(
            keys_of_groups,
            q=nn.Linear(32, 32),
            k=nn.Linear(32, 16),
            v=nn.Linear(32, 16),
            o=nn.Linear(32, 7),
        ),
        TOKENS,
        {"q.heads": 2, "q.head_dim": 8, "v.head_dim": 8, **inputs},
    ),
    "unpadded": (
        Fn(unpadded, a=nn.Linear(32, 6), b=nn.Linear(6, 8), c=nn.Linear(8, 3)),
        TOKENS,
        {"a": 6, "b": 8, "a.in": 32},
    ),
    "masked": (
        Fn(masked, a=nn.Linear(32, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 8), d=nn.Linear(8, 3)),
        TOKENS,
        {"a": 8, "b": 6, "a.in": 32},
    ),
    "merged_heads": attention(merged_heads),
    "heads_over_edges": (
        Fn(heads_over_edges, **qkv),
        TOKENS,
        {"q.heads": 4, "q.head_dim": 8, "v": 8, **inputs},
    ),
    "alibi": attention(alibi),
    "picked_by_identity": (
        Fn(
            lambda m, x: m.b(m.a(x) @ torch.eye(8, dtype=x.dtype).flip(1)),
            a=nn.Linear(10, 8),
            b=nn.Linear(8, 3),
        ),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "heads_by_letters": attention(heads_by_letters),
    "heads_beside_the_batch": (
        Fn(
            pooled_heads,
            qkv=nn.Linear(32, 96),
            pool=nn.Conv1d(8, 8, 3, stride=2, groups=8),
            norm=nn.LayerNorm(8),
            o=nn.Linear(32, 7),
        ),
        TOKENS,
        {"qkv.heads": 4, "qkv.head_dim": 8, "qkv.in": 32},
    ),
    "across_channels": (
        Fn(across_channels, heat=nn.Parameter(torch.ones(4, 1, 1)), **qkv),
        TOKENS,
        {"q.heads": 4, "q": 8, **inputs},
    ),
    "written_in_place": (
        Fn(written_in_place, a=nn.Linear(32, 32), b=nn.Linear(32, 32), o=nn.Linear(32, 7)),
        TOKENS,
        {"a": 4, "a#2": 8, "a.in": 32, "b.in": 32},
    ),
    "windows": (
        Fn(windows, a=conv(3, 8), b=conv(8, 2), c=conv(8, 2)),
        IMAGE,
        {"a": 8},
    ),
    "squeeze_excite": (
        Fn(squeeze_excite, a=conv(3, 8), down=conv(8, 4, 1), up=conv(4, 8, 1), b=conv(8, 2)),
        IMAGE,
        {"a": 8, "down": 4},
    ),
    "hard_coded_view": (
        Fn(lambda m, x: m.b(m.a(x).view(2, 8 * 36)), a=conv(3, 8), b=nn.Linear(288, 3)),
        IMAGE,
        {"a": 8, "b.in": 288},
    ),
    "nhwc_flatten": (
        Fn(
            lambda m, x: m.b(m.a(x).permute(0, 2, 3, 1).flatten(1)),
            a=conv(3, 8),
            b=nn.Linear(288, 3),
        ),
        IMAGE,
        {"a": 8, "b.in": 288},
    ),
    "glu": (
        nn.Sequential(nn.Linear(10, 16), nn.GLU(), nn.Linear(8, 3)),
        FLAT,
        {"0": 8, "0.in": 10},
    ),
    "uneven_split": (
        Fn(
            lambda m, x: m.b((p := m.a(x).split([4, 12], 1))[0]) + m.c(p[1].tanh()),
            a=nn.Linear(10, 16),
            b=nn.Linear(4, 3),
            c=nn.Linear(12, 3),
        ),
        FLAT,
        {"a": 4, "a#2": 12, "a.in": 10},
    ),
    "maxout": (
        Fn(lambda m, x: m.b(m.a(x).view(2, 8, 2).amax(2)), a=nn.Linear(10, 16), b=nn.Linear(8, 3)),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "channel_shuffle": (
        Fn(channel_shuffle, a=conv(3, 8), b=conv(8, 2)),
        IMAGE,
        {"a": 2, "a#2": 4},
    ),
    "pixel_shuffle": (
        nn.Sequential(conv(3, 16), nn.PixelShuffle(2), nn.ReLU(), conv(4, 2)),
        IMAGE,
        {"0": 4},
    ),
    "raw_parameters": (
        Fn(
            lambda m, x: torch.relu(x @ m.u + m.c) @ m.v,
            u=nn.Parameter(torch.randn(10, 8)),
            c=nn.Parameter(torch.randn(8)),
            v=nn.Parameter(torch.randn(8, 3)),
        ),
        FLAT,
        {"u": 8},
    ),
    "einsum": (
        Fn(
            lambda m, x: torch.einsum("bh,ho->bo", torch.einsum("bi,hi->bh", x, m.u).relu(), m.v),
            u=nn.Parameter(torch.randn(8, 10)),
            v=nn.Parameter(torch.randn(8, 3)),
        ),
        FLAT,
        {"u": 8},
    ),
    "shared_layer": (
        Fn(
            lambda m, x: m.c(m.b(F.relu(m.b(F.relu(m.a(x)))))),
            a=nn.Linear(10, 8),
            b=nn.Linear(8, 8),
            c=nn.Linear(8, 3),
        ),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "scale_buffer": (
        Fn(lambda m, x: m.b(m.a(x) * m.s), a=nn.Linear(10, 8), b=nn.Linear(8, 3), s=torch.rand(8)),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "weight_norm": (
        nn.Sequential(nn.Linear(10, 8), nn.ReLU(), weight_norm(nn.Linear(8, 3))),
        FLAT,
        {"0": 8, "0.in": 10},
    ),
    "layer_norm_stream": (
        nn.Sequential(
            nn.Linear(10, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)
        ),
        FLAT,
        {"0": 8, "2": 6, "0.in": 10},
    ),
    "positions_in_a_buffer": (
        Fn(
            lambda m, x: m.b((y := m.a(x) + m.p[:5]) + m.d(m.c(m.norm(y)).relu())),
            a=nn.Linear(32, 8),
            p=torch.randn(7, 8),
            norm=nn.LayerNorm(8),
            c=nn.Linear(8, 6),
            d=nn.Linear(6, 8),
            b=nn.Linear(8, 3),
        ),
        TOKENS,
        {"a": 8, "c": 6, "a.in": 32},
    ),
    "separate_projections": (
        Fn(attend, **qkv),
        TOKENS,
        {"q.head_dim": 8, "q.heads": 4, "v.head_dim": 8, **inputs},
    ),
    "rotary": (
        Fn(attend, frequency=torch.linspace(0.1, 1, 4), **qkv),
        TOKENS,
        {"q.head_dim": 4, "q.heads": 4, "v.head_dim": 8, **inputs},
    ),
    "grouped_query": (
        Fn(
            lambda m, x: attend(m, x, kv=2),
            q=nn.Linear(32, 32),
            k=nn.Linear(32, 16),
            v=nn.Linear(32, 16),
            o=nn.Linear(32, 32),
        ),
        TOKENS,
        {"q.head_dim": 8, "q.heads": 2, "v.head_dim": 8, **inputs},
    ),
    "fused_by_hand": (
        Fn(by_hand, qkv=nn.Linear(32, 96), o=nn.Linear(32, 7)),
        TOKENS,
        {},
    ),
    "multi_head_attention": (
        Fn(
            lambda m, x: m.attention(x, x, x, need_weights=False)[0],
            attention=nn.MultiheadAttention(32, 4, batch_first=True),
        ),
        TOKENS,
        {},
    ),
    "queries_with_positions": (
        Fn(
            with_positions,
            a=nn.Linear(32, 16),
            p=nn.Parameter(torch.randn(1, 16)),
            attention=nn.MultiheadAttention(16, 4, batch_first=True),
            b=nn.Linear(16, 7),
        ),
        TOKENS,
        {
            "a": 16,
            "attention.in_proj_weight.heads": 4,
            "attention.in_proj_weight.head_dim": 4,
            "attention.in_proj_weight.head_dim#2": 4,
            "attention.out_proj": 16,
            "a.in": 32,
        },
    ),
    "by_letters": (
        Fn(
            by_letters,
            a=nn.Parameter(torch.randn(12, 32)),
            scale=nn.Parameter(torch.rand(12)),
            b=nn.Parameter(torch.randn(3, 12)),
        ),
        TOKENS,
        {"a.heads": 12},
    ),
    "one_group_for_all_heads": (
        Fn(one_group_for_all_heads, a=nn.Linear(32, 24), b=nn.Linear(12, 3)),
        TOKENS,
        {"a.heads": 4, "a.head_dim": 3, "a.head_dim#2": 6, "a.in": 32},
    ),
    "cast_as_another": (
        Fn(
            cast_as_another,
            a=nn.Linear(10, 8),
            w=nn.Parameter(torch.randn(2, 5, 8)),
            b=nn.Linear(10, 3),
        ),
        FLAT,
        {"a": 8, "w": 2, "w#2": 5, "a.in": 10},
    ),
    "of_each_example": (
        Fn(of_each_example, a=nn.Linear(32, 12), b=nn.Linear(12, 3)),
        TOKENS,
        {"a": 12, "a.in": 32},
    ),
    "with_a_tangent": (
        Fn(with_a_tangent, a=nn.Linear(10, 8), b=nn.Linear(8, 3), c=nn.Linear(10, 8)),
        FLAT,
        {"a": 8, "a.in": 10, "c.in": 10},
    ),
    "deformed": (
        Fn(
            deformed,
            a=conv(3, 8),
            where=conv(8, 18),
            much=conv(8, 9),
            w=nn.Parameter(torch.randn(6, 8, 3, 3)),
            bias=nn.Parameter(torch.randn(6)),
            b=conv(6, 2),
        ),
        IMAGE,
        {"a": 8, "w": 6},
    ),
    "deformed_in_groups": (
        Fn(
            deformed_in_groups,
            a=conv(3, 8),
            where=conv(3, 72),
            w=nn.Parameter(torch.randn(6, 4, 3, 3)),
            b=conv(6, 2),
        ),
        IMAGE,
        {"a": 2, "w": 3},
    ),
    "messages_of_a_graph": (
        Fn(messages, a=nn.Linear(32, 12), b=nn.Linear(12, 3)),
        TOKENS,
        {"a": 12, "a.in": 32},
    ),
    "spectral_norm_by_hand": (
        Fn(
            with_spectral_norm,
            a=nn.Linear(32, 12),
            w=nn.Parameter(torch.randn(10, 12)),
            u=torch.randn(10),
            v=torch.randn(12),
            b=nn.Linear(10, 3),
        ),
        TOKENS,
        {"a": 12, "w": 10, "a.in": 32},
    ),
    "pieces_of_weights": (
        Fn(
            pieces,
            rows=nn.Parameter(torch.randn(24, 32)),
            columns=nn.Parameter(torch.randn(12, 16)),
            b=nn.Linear(12, 7),
        ),
        TOKENS,
        {"rows": 8, "rows#2": 8, "columns": 12},
    ),
    "encoder_layer": (
        nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0),
        TOKENS,
        {},
    ),
    # Found by strangers.
    "prelu_of_each_channel": (
        Fn(
            lambda m, x: m.b(m.p(m.a(x))).mean((2, 3)),
            a=conv(3, 6),
            p=nn.PReLU(6, init=0.3),
            b=conv(6, 2),
        ),
        IMAGE,
        {"a": 6},
    ),
    "computed_and_thrown_away": (
        Fn(
            lambda m, x: (m.c(m.b(x)), m.c(m.a(x).relu()))[1],
            a=nn.Linear(10, 8),
            b=nn.Linear(10, 8),
            c=nn.Linear(8, 3),
        ),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "weight_read_both_ways": (
        Fn(
            lambda m, x: F.linear(m.e(x).relu(), m.e.weight.t(), m.b),
            e=nn.Linear(10, 8),
            b=nn.Parameter(torch.randn(10)),
        ),
        FLAT,
        {"e": 8},
    ),
    "weight_norm_inside": (
        Fn(
            lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
            a=nn.Linear(10, 8),
            b=weight_norm(nn.Linear(8, 6)),
            c=nn.Linear(6, 3),
        ),
        FLAT,
        {"a": 8, "b.parametrizations.weight.original0": 6, "a.in": 10},
    ),
    "weights_transposed_in_every_way": (
        Fn(
            lambda m, x: (
                ((x @ m.a.T).tanh() @ m.b.mT).tanh() @ m.c.swapaxes(0, 1) @ m.d.movedim(0, 1)
            ),
            a=nn.Parameter(torch.randn(8, 10)),
            b=nn.Parameter(torch.randn(6, 8)),
            c=nn.Parameter(torch.randn(5, 6)),
            d=nn.Parameter(torch.randn(3, 5)),
        ),
        FLAT,
        {"a": 8, "b": 6, "c": 5},
    ),
    "starts_from_zeros": (
        Fn(
            lambda m, x: m.c((torch.zeros(2, 8, dtype=x.dtype) + m.a(x)).relu()),
            a=nn.Linear(10, 8),
            c=nn.Linear(8, 3),
        ),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "sampled_on_a_grid": (
        Fn(
            lambda m, x: m.b(
                F.grid_sample(m.a(x), m.grid.to(x).expand(2, -1, -1, -1), align_corners=False)
            ),
            a=conv(3, 8),
            b=conv(8, 2),
            grid=torch.rand(1, 4, 5, 2) * 2.4 - 1.2,
        ),
        IMAGE,
        {"a": 8},
    ),
    "recurrent": (
        Fn(
            lambda m, x: m.c(m.r(m.a(x), x.new_zeros(1, 2, 6))[0]),
            a=nn.Linear(32, 8),
            r=nn.GRU(8, 6, batch_first=True),
            c=nn.Linear(6, 3),
        ),
        STEPS,
        {"a": 8, "r": 6, "a.in": 32},
    ),
    "recurrent_in_two_directions": (
        Fn(
            lambda m, x: m.c(m.r(F.layer_norm(m.a(x), (8,), m.w))[0]),
            a=nn.Linear(32, 8),
            w=nn.Parameter(torch.rand(8)),
            r=nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True),
            c=nn.Linear(12, 3),
        ),
        STEPS,
        {"a": 8, "r": 6, "a.in": 32},
    ),
}
