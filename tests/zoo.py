"""Every small network of the tests by its name, once: what the conformance suite runs through.

The tables are grouped by what is special about their networks. A network that a new rule, layer or
operator needs goes into one of them (or here, where nothing of it is shared), and is then gated,
closed, exported, written, read again and gated again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import small_networks
import torch
import torch.nn.functional as F
from averages import AVERAGES
from deadness import randomise
from made_weights import MADE_WEIGHTS
from models import Tied
from networks import CASES, IMAGE, Fn
from reordered import REORDERED
from selections import SELECTIONS
from spectra import SPECTRA
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


@dataclass(frozen=True)
class Network:
    """A small network: how it and its example are made, and the axes that it should have."""

    make: Callable[[], tuple[nn.Module, tuple]]
    axes: tuple[int, ...] | None = None  # sizes in any order, where they are told here
    why: str = ""  # nothing of it can be cut, with this reason
    rows: tuple[int, ...] = (3,)  # numbers of examples that its file takes
    no_onnx: str = ""  # torch's exporter cannot write it, as this says

    def made(self, seed: int = 0) -> tuple[nn.Module, tuple]:
        """In float64 and eval mode, with nothing in it that is zero by chance."""
        torch.manual_seed(seed)
        module, args = self.make()
        args = tuple(x.double() if x.is_floating_point() else x for x in args)
        return randomise(module).double().eval(), args


def _of_table(module: nn.Module, shape: tuple[int, ...]) -> Network:
    return Network(lambda: (copy.deepcopy(module), (torch.randn(shape),)))


TABLES = {**CASES, **AVERAGES, **MADE_WEIGHTS, **REORDERED, **SELECTIONS, **SPECTRA}
ZOO = {name: _of_table(module, shape) for name, (module, shape, _) in TABLES.items()}
for _name, _make in small_networks.CASES.items():
    if _name not in TABLES:
        _axes = tuple(small_networks.AXES.get(_name, ())) or None
        ZOO[_name] = Network(_make, _axes, small_networks.REASONS.get(_name, ""))


def network(shape: tuple[int, ...], *axes: int, rows: tuple[int, ...] = (3,)) -> Callable:
    """Put a function that makes a module into the zoo."""

    def keep(make: Callable[[], nn.Module]) -> Callable:
        ZOO[make.__name__] = Network(
            lambda: (make(), (torch.randn(shape),)), axes or None, rows=rows
        )
        return make

    return keep


ZOO["neural_operator"] = replace(ZOO["neural_operator"], no_onnx="complex")
ZOO["tied_table_with_bias"] = Network(
    lambda: (Tied(mix=False, bias=True), (torch.randint(0, 20, (2, 5)),))
)


class Standardised(nn.Conv2d):
    """As NFNets have it: rows of mean 0 and variance 1, times a gain."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        scale = (self.gain * 0.3).view(-1)
        weight = F.batch_norm(rows, None, None, weight=scale, training=True, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, groups=self.groups)


@network(IMAGE, 8, 10)
def standardised_with_gains():
    convolutions = Standardised(3, 8, 3), Standardised(8, 10, 1), Standardised(10, 4, 1)
    return nn.Sequential(convolutions[0], nn.SiLU(), convolutions[1], nn.GELU(), convolutions[2])


@network(IMAGE)
def standardised_in_groups():
    grouped = Standardised(8, 12, 1, groups=4)
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), grouped, nn.ReLU(), nn.Conv2d(12, 2, 1))


@network(IMAGE, 5, 8)
def weight_norms_over_what_is_cut():
    return nn.Sequential(
        weight_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(), weight_norm(nn.Conv2d(8, 10, 1)),
        nn.LeakyReLU(), weight_norm(nn.Conv2d(10, 4, 1, groups=2)),
    )  # fmt: skip


@network((2, 3, 5))
def a_weight_norm_for_each_position_of_the_kernel():
    """As the positional convolution of wav2vec 2.0 has it, beside a residual stream."""

    def forward(m, x):
        x = m.embed(x)
        return m.read(F.layer_norm((x + F.gelu(m.conv(x))).mT, (8,)).mT)

    positions = weight_norm(nn.Conv1d(8, 8, 3, padding=1, groups=2), dim=2)
    return Fn(forward, embed=nn.Conv1d(3, 8, 1), read=nn.Conv1d(8, 4, 1), conv=positions)


@network(IMAGE)
def kernels_for_each_example():
    def forward(m, x):
        n, h = x.shape[0], torch.relu(m.a(x))
        kernels = m.k(h.flatten(1)).view(n * 2, 4, 3, 3)
        y = F.conv2d(h.reshape(1, n * 4, 6, 6), kernels, groups=n, padding=1)
        return m.b(y.view(n, 2, 6, 6))

    layers = {"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.Conv2d(2, 3, 1), "k": nn.Linear(144, 72)}
    return Fn(forward, **layers)


@network(IMAGE)
def heads_in_the_batch_of_a_grid():
    def forward(m, x):
        n, grid = x.shape[0], torch.linspace(-1, 1, 4 * 6 * 2, dtype=x.dtype).view(1, 4, 6, 2)
        values, places = m.v(x).view(n * 2, 4, 6, 6), grid.expand(n * 2, 4, 6, 2)
        return m.o(F.grid_sample(values, places, align_corners=False).reshape(n, 8, 4, 6))

    return Fn(forward, v=nn.Conv2d(3, 8, 1), o=nn.Conv2d(8, 4, 1))


@network(IMAGE)
def a_branch_of_the_graphs():
    def forward(m, x):
        h = torch.relu(m.c(x))
        return m.b(m.d(torch.cond(x.sum() > 0, torch.sin, torch.cos, (h,))))

    return Fn(forward, c=nn.Conv2d(3, 6, 1), d=nn.Conv2d(6, 2, 1), b=nn.Conv2d(2, 3, 1))


@network((2, 5, 3), rows=(1, 2, 5))
def heads_through_the_batch():
    """Of the Set Transformer: heads go through the batch, and come back by its size."""

    def attend(m, a, b):
        q, k, v = (torch.cat(each.split(4, 2), 0) for each in (m.q(a), m.k(b), m.v(b)))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / 3, 2)
        o = torch.cat((q + weights.bmm(v)).split(a.size(0), 0), 2)
        return o + F.relu(m.fc(o))

    def forward(m, x):
        h = attend(m, m.points.repeat(x.size(0), 1, 1), F.relu(m.embed(x)))
        return m.out(F.relu(h).sum(1))

    layers = {name: nn.Linear(8, 8) for name in ("q", "k", "v", "fc")}
    layers |= {"points": nn.Parameter(torch.randn(1, 2, 8)), "embed": nn.Linear(3, 8)}
    return Fn(forward, **layers, out=nn.Linear(8, 3))


@network((2, 5, 6), rows=(1, 2, 5))
def heads_in_chunks_of_the_batch():
    def forward(m, x):
        q = torch.cat(torch.chunk(m.q(x), 2, -1), 0)
        return m.out(torch.relu(torch.cat((torch.softmax(q @ q.mT, -1) @ q).chunk(2), -1)))

    return Fn(forward, q=nn.Linear(6, 8), out=nn.Linear(8, 3))


@network((2, 6), rows=(1, 40))
def distances_from_every_row():
    """torch computes them in another way where there are more than 25."""
    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 4)}
    points = nn.Parameter(torch.randn(3, 4))
    return Fn(lambda m, x: torch.cdist(m.b(torch.relu(m.a(x))), m.points), points=points, **layers)


class Modulated(nn.Module):
    """StyleGAN2's convolution: each example has filters of its own."""

    def __init__(self, inputs, outputs, side=3, up=False, demodulate=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, outputs, inputs, side, side))
        self.style, self.up, self.demodulate = nn.Linear(8, inputs), up, demodulate

    def forward(self, x, style):
        b, c, h, w = x.shape
        weight = self.weight * (self.style(style) + 1).view(b, 1, c, 1, 1)
        if self.demodulate:
            norm = torch.rsqrt(weight.square().sum([2, 3, 4]) + 1e-8)
            weight = weight * norm.view(b, -1, 1, 1, 1)
        side = weight.shape[-1]
        x = x.reshape(1, b * c, h, w)
        if self.up:
            weight = weight.transpose(1, 2).reshape(b * c, -1, side, side)
            x = F.conv_transpose2d(x, weight, padding=1, stride=2, output_padding=1, groups=b)
        else:
            x = F.conv2d(x, weight.view(-1, c, side, side), padding=side // 2, groups=b)
        return x.view(b, -1, *x.shape[-2:])


@network((2, 5), rows=(1, 2, 5))
def filters_of_each_examples_own():
    def forward(m, z):
        style = F.leaky_relu(m.map(z), 0.2)
        x = F.leaky_relu(m.a(m.start.repeat(z.shape[0], 1, 1, 1), style), 0.2)
        return m.rgb(F.leaky_relu(m.b(x, style), 0.2), style)

    layers = {"a": Modulated(6, 8, up=True), "b": Modulated(8, 8)}
    start, rgb = nn.Parameter(torch.randn(1, 6, 4, 4)), Modulated(8, 3, side=1, demodulate=False)
    return Fn(forward, start=start, map=nn.Linear(5, 8), **layers, rgb=rgb)


def a_sequence_that_grows():
    def forward(m, ids):
        for _ in range(3):
            h = torch.relu(m.a(m.embed(ids))).cumsum(1)
            ids = torch.cat([ids, m.out(h[:, -1]).argmax(-1, keepdim=True)], 1)
        return m.out(torch.relu(m.a(m.embed(ids))))

    layers = {"embed": nn.Embedding(11, 8), "a": nn.Linear(8, 16), "out": nn.Linear(16, 11)}
    return Fn(forward, **layers), (torch.randint(11, (2, 4)),)


ZOO["a_sequence_that_grows"] = Network(a_sequence_that_grows, rows=(1, 2, 5))


class InBlocks(nn.Module):
    """Attention within blocks of positions, beside the heads: five dims, or only three."""

    def __init__(self, mask, leading):
        super().__init__()
        self.qkv, self.proj, self.leading = nn.Linear(12, 36), nn.Linear(12, 5), leading
        self.register_buffer("mask", mask)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:-1], 3, 3, 4).movedim((-3, -2), (0, -3))
        if self.leading == 3:
            q, k, v = (each.flatten(0, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.proj(y.reshape(x.shape[0], 2, 3, 7, 4).transpose(2, 3).flatten(3))


MASKS = {"none": lambda: None, "added": lambda: torch.randn(7, 7), "of_booleans": torch.eye(7).bool}
for _name, _mask in MASKS.items():
    for _leading in (5, 3):
        ZOO[f"attention_of_{_leading}_dims_mask_{_name}"] = Network(
            lambda mask=_mask, leading=_leading: (
                InBlocks(mask(), leading),
                (torch.randn(2, 2, 7, 12),),
            )
        )
