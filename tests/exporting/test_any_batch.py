"""Code that puts the batch where sizes are: its dense modules, programs and files take any."""

from __future__ import annotations

import onnx
import pytest
import torch
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
