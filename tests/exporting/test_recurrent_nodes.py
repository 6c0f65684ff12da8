"""Recurrent layers in ONNX files: one operator for each layer, over any number of steps."""

from __future__ import annotations

import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import of_scale, run_onnx, tensors
from example_counts import costliest
from hypothesis import given
from hypothesis import strategies as st
from networks import Fn
from torch import nn

import l0prune


class Frames(nn.Module):
    """A recurrent layer behind and before Linears; all that it returns is read."""

    def __init__(self, kind, width=6, **settings):
        super().__init__()
        directions = 2 if settings.get("bidirectional") else 1
        size = settings.get("proj_size") or width
        self.first = kind is nn.LSTM, settings.get("batch_first", False)
        self.a, self.r = nn.Linear(5, 7), kind(7, width, **settings)
        self.b, self.c = nn.Linear(size * directions, 3), nn.Linear(size, 2)

    def forward(self, x, *state):
        is_lstm, batch_first = self.first
        x = self.a(x if batch_first else x.transpose(0, 1))
        y, last = self.r(x, (state if is_lstm else state[0]) if state else None)
        return self.b(y), self.c(last[0] if is_lstm else last)


def written(net, path, *, seed=1):
    """Gate, close some slots, export, write; every check at other lengths and batches is here."""
    x = torch.randn(2, 5, 5)
    l0prune.gate(randomise(net).eval(), x, dynamic_shapes={"x": {1: "frames"}}, exclude="*.in")
    small = l0prune.export(close_some(net, seed=seed))
    assert [piece.free.names for piece in small.pieces] == [("frames",)]
    small.save_onnx(path)
    for rows, frames in ((1, 9), (3, 2), (2, 40)):
        x = torch.randn(rows, frames, 5)
        with torch.no_grad():
            expected, program = net(x), small.program.module()(x)
        for found in (program, run_onnx(path, x)):
            for ours, theirs in zip(tensors(expected), tensors(found), strict=True):
                assert of_scale(ours, theirs) <= 1e-5
    return small, [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        (nn.LSTM, "LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.GRU, "GRU", {"num_layers": 3, "bias": False}),
        (nn.RNN, "RNN", {"bidirectional": True, "nonlinearity": "relu"}),
        (nn.LSTM, "Scan", {"bidirectional": True, "proj_size": 4, "batch_first": True}),
    ],
)
@pytest.mark.one_in(4)
def test_one_operator_a_layer(kind, name, settings, tmp_path):
    torch.manual_seed(0)
    dense, operators = written(Frames(kind, **settings), tmp_path / "model.onnx")
    layers = settings.get("num_layers", 1) * (2 if name == "Scan" else 1)
    assert operators.count(name) == layers
    assert set(operators) <= {name, "MatMul", "Gemm", "Add", "Transpose", "Squeeze", "Concat",
        "Gather", "Unsqueeze", "Slice", "Shape", "ConstantOfShape", "Split", "Reshape"}  # fmt: skip
    assert dense.params < dense.params_before


@pytest.mark.slow
def test_large_weights_lie_in_the_file_as_the_operator_takes_them(tmp_path):
    """The exporter's own optimizer leaves it to the runtime to put large ones in order."""
    torch.manual_seed(0)
    net = Frames(nn.LSTM, 200, batch_first=True)
    _, operators = written(net, tmp_path / "model.onnx")
    assert set(operators) <= {"MatMul", "Gemm", "Add", "Transpose", "LSTM", "Squeeze"}


@pytest.mark.parametrize("settings", [{}, {"proj_size": 4}, {"num_layers": 2}], ids=str)
@pytest.mark.slow
def test_states_that_are_inputs(settings, tmp_path):
    torch.manual_seed(0)
    net = randomise(Frames(nn.LSTM, batch_first=True, **settings)).eval()
    layers, size = settings.get("num_layers", 1), settings.get("proj_size", 6)

    def inputs(frames):
        return torch.randn(2, frames, 5), torch.randn(layers, 2, size), torch.randn(layers, 2, 6)

    l0prune.gate(net, inputs(5), dynamic_shapes={"x": {1: "frames"}}, exclude="*.in")
    l0prune.export(close_some(net)).save_onnx(tmp_path / "model.onnx")
    given = inputs(11)
    with torch.no_grad():
        expected = tensors(net(*given))
    for ours, theirs in zip(expected, run_onnx(tmp_path / "model.onnx", *given), strict=True):
        assert of_scale(ours, theirs) <= 1e-5


@pytest.mark.slow
@costliest
@given(
    kind=st.sampled_from((nn.LSTM, nn.GRU, nn.RNN)),
    layers=st.integers(1, 3),
    ways=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    projected=st.booleans(),
    seed=st.integers(0, 99),
)
def test_files_of_all_layers_with_any_slots_closed(kind, layers, ways, projected, seed, tmp_path):
    settings = dict(zip(("bidirectional", "batch_first", "bias"), ways, strict=True))
    if kind is nn.LSTM and projected:
        settings["proj_size"] = 4
    torch.manual_seed(seed)
    net = Frames(kind, num_layers=layers, **settings)
    dense, operators = written(net, tmp_path / "model.onnx", seed=seed)
    assert len(operators) <= 40 * layers
    assert dense.params < dense.params_before


def test_a_loop_over_the_steps_is_said_to_fix_their_number():
    def forward(m, x):
        state = None
        for step in range(x.shape[1]):
            state = m.r(x[:, step], state)
        return m.b(state)

    net = Fn(forward, r=nn.GRUCell(5, 6), b=nn.Linear(6, 2))
    with pytest.raises(l0prune.errors.UsageError, match=r"for step in range.*a loop in Python"):
        l0prune.gate(net, torch.randn(2, 4, 5), dynamic_shapes={"args": ({1: "steps"},)})
