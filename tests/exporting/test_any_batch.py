"""Code that puts the batch where sizes are: its dense modules, programs and files take any."""

from __future__ import annotations

import onnx
import pytest
import torch
import torch.nn.functional as F
from deadness import close_some, randomise
from differences import as_graph, run_onnx
from models import Broken
from networks import Fn
from round_trips import through_pt2
from torch import nn

import l0prune


def cut(model, example):
    torch.manual_seed(0)
    l0prune.gate(randomise(model).eval(), example)
    return close_some(model, seed=1), l0prune.export(model)


@torch.no_grad()
def check(model, dense, x, tmp_path, sizes=(1, 2, 5)):
    """Do module, program and file compute what the model does, of so many rows?"""
    (file,) = dense.save_onnx(tmp_path / "model.onnx")
    program = through_pt2(dense.program)
    for size in sizes:
        rows = x[torch.randint(len(x), (size,))]
        if rows.is_floating_point():
            rows = rows + torch.randn_like(rows) / 10
        expected = model(rows)
        for found in (dense.module(rows), program(rows)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        (written,) = run_onnx(file, rows)
        torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-5)
    return onnx.load(file).graph


class Attention(nn.Module):
    """Of the Set Transformer: heads go through the batch, and come back by its size."""

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, a, b):
        q, k, v = self.q(a), self.k(b), self.v(b)
        q, k, v = (torch.cat(each.split(each.size(2) // self.heads, 2), 0) for each in (q, k, v))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / 3, 2)
        o = torch.cat((q + weights.bmm(v)).split(a.size(0), 0), 2)
        return o + F.relu(self.out(o))


class Sets(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.points = nn.Linear(3, 8), nn.Parameter(torch.randn(1, 2, 8))
        self.attend, self.out = Attention(8), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.embed(x))
        h = self.attend(self.points.repeat(x.size(0), 1, 1), x)
        return self.out(F.relu(h).sum(1))


@pytest.mark.slow
def test_heads_that_go_through_the_batch(tmp_path):
    x = torch.randn(2, 5, 3)
    model, dense = cut(Sets(), x)
    check(model, dense, x, tmp_path)


@pytest.mark.slow
def test_heads_in_chunks_of_the_batch(tmp_path):
    def forward(m, x):
        q = torch.cat(torch.chunk(m.q(x), 2, -1), 0)
        o = torch.cat((torch.softmax(q @ q.mT, -1) @ q).chunk(2), -1)
        return m.out(torch.relu(o))

    x = torch.randn(2, 5, 6)
    model, dense = cut(Fn(forward, q=nn.Linear(6, 8), out=nn.Linear(8, 3)), x)
    check(model, dense, x, tmp_path)


@pytest.mark.slow
def test_distances_from_every_row(tmp_path):
    """torch computes them in another way where there are more than 25."""

    def forward(m, x):
        return torch.cdist(m.b(torch.relu(m.a(x))), m.points)

    x, layers = torch.randn(2, 6), {"a": nn.Linear(6, 8), "b": nn.Linear(8, 4)}
    model, dense = cut(Fn(forward, points=nn.Parameter(torch.randn(3, 4)), **layers), x)
    check(model, dense, x, tmp_path, sizes=(1, 40))


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


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.map = nn.Parameter(torch.randn(1, 6, 4, 4)), nn.Linear(5, 8)
        self.a, self.b = Modulated(6, 8, up=True), Modulated(8, 8)
        self.rgb = Modulated(8, 3, side=1, demodulate=False)

    def forward(self, z):
        style = F.leaky_relu(self.map(z), 0.2)
        x = F.leaky_relu(self.a(self.start.repeat(z.shape[0], 1, 1, 1), style), 0.2)
        return self.rgb(F.leaky_relu(self.b(x, style), 0.2), style)


@pytest.mark.slow
def test_filters_of_each_examples_own(tmp_path):
    z = torch.randn(2, 5)
    model, dense = cut(Painter(), z)
    check(model, dense, z, tmp_path)


class Shifted(nn.Module):
    """A temporal shift: frames of all clips are rows of the batch, four to a clip."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Linear(8, 2)

    def forward(self, frames):
        h = torch.relu(self.a(frames))
        h = torch.relu(self.b(self.shift(h)))
        return self.out(h.mean((2, 3))).view(-1, 4, 2).mean(1)

    def shift(self, x):
        rows, c, h, w = x.size()
        x = x.view(rows // 4, 4, c, h, w)
        out, part = torch.zeros_like(x), c // 4
        out[:, :-1, :part] = x[:, 1:, :part]
        out[:, 1:, part : 2 * part] = x[:, :-1, part : 2 * part]
        out[:, :, 2 * part :] = x[:, :, 2 * part :]
        return out.view(rows, c, h, w)


@pytest.mark.parametrize("clips", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_frames_of_clips_in_the_batch(clips, tmp_path):
    x = torch.randn(4 * clips, 3, 6, 6)
    model, dense = cut(Shifted(), x)
    assert "batches of multiples of 4: the model's forward takes so many rows" in dense.note
    graph = check(model, dense, x, tmp_path, sizes=(4, 8, 20))
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "4*batch"
    assert graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {c.batch for c in dense.certificate.checks} == {4, 8, 12}
    with pytest.raises((RuntimeError, AssertionError)):
        dense.program.module()(torch.randn(6, 3, 6, 6))


@pytest.mark.slow
def test_the_graph_asks_for_whole_clips():
    x = torch.randn(8, 3, 6, 6)
    with as_graph():
        model, dense = cut(Shifted(), x)
    torch.testing.assert_close(dense.module(x[:4]), model(x[:4]))
    with pytest.raises(RuntimeError, match="measure multiples of 4"):
        dense.module(torch.randn(6, 3, 6, 6))


@pytest.mark.slow
def test_a_sequence_that_grows(tmp_path):
    def forward(m, ids):
        for _ in range(3):
            h = torch.relu(m.a(m.embed(ids))).cumsum(1)
            ids = torch.cat([ids, m.out(h[:, -1]).argmax(-1, keepdim=True)], 1)
        return m.out(torch.relu(m.a(m.embed(ids))))

    layers = {"embed": nn.Embedding(11, 8), "a": nn.Linear(8, 16), "out": nn.Linear(16, 11)}
    ids = torch.randint(11, (2, 4))
    model, dense = cut(Fn(forward, **layers), ids)
    check(model, dense, ids, tmp_path)


class Told(Broken):
    """Its second part is told how many examples there are."""

    def __init__(self):
        super().__init__()
        self.a = Fn(lambda m, x: m.l(x), l=nn.Linear(4, 6))
        self.b = Fn(
            lambda m, x, n: m.o(torch.relu(m.i(x)).view(n, 3, -1)).sum(1),
            i=nn.Linear(6, 12),
            o=nn.Linear(4, 2),
        )

    def forward(self, x):
        h = self.a(x)
        h = h if float(h.sum()) < 1e9 else h * 2
        return self.b(h, x.shape[0])


@torch.no_grad()
@pytest.mark.slow
def test_a_part_that_is_told_the_batch(tmp_path):
    x = torch.randn(3, 4)
    model, dense = cut(Told(), x)
    pieces = {piece.path: piece for piece in dense.pieces}
    assert pieces.keys() == {"a", "b"}
    assert [piece.takes for piece in pieces.values()] == ["1 or more"] * 2
    files = dict(zip("ab", dense.save_onnx(tmp_path / "model.onnx"), strict=True))
    for rows in (1, 2, 5):
        x = torch.randn(rows, 4)
        h = model.a(x)
        (written,) = run_onnx(files["b"], h, torch.tensor(rows))
        torch.testing.assert_close(written, model.b(h, rows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dense.module(x), model(x))
