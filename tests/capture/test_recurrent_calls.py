"""Recurrent calls in captured programs: one operator each, for any number of steps."""

from __future__ import annotations

import warnings

import pytest
import torch
from example_counts import costly
from hypothesis import given
from hypothesis import strategies as st
from networks import Fn
from round_trips import through_pt2
from torch import nn
from torch.export import Dim

from l0prune.capture.kept_state import exported
from l0prune.capture.symbolic_patches import RECURRENT_CALLS

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


@st.composite
def layers(draw):
    """A recurrent layer of any kind."""
    kind = draw(st.sampled_from(KINDS))
    settings = {"num_layers": draw(st.integers(1, 3))}
    settings |= {name: draw(st.booleans()) for name in ("bias", "bidirectional", "batch_first")}
    if kind is nn.LSTM:
        settings["proj_size"] = draw(st.sampled_from((0, 2)))
    elif kind is nn.RNN:
        settings["nonlinearity"] = draw(st.sampled_from(("tanh", "relu")))
    return kind(3, 4, **settings).eval()


def program_of(net, x):
    free = {"args": ({0: Dim.AUTO, 1: Dim.AUTO},)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exported(net, (x,), {}, dynamic_shapes=free)


@costly
@given(layers())
def test_a_program_computes_what_torch_does_at_any_length(layer):
    net = Fn(lambda m, x: m.r(x), r=layer)
    program = program_of(net, torch.randn(3, 5, 3))
    (call,) = [node for node in program.graph.nodes if node.target in RECURRENT_CALLS]
    assert call.target.namespace == "aten"
    for shape in ((1, 4, 3), (7, 2, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=0, atol=0)


@pytest.mark.slow
def test_programs_in_files_and_of_programs_keep_the_free_length():
    net = Fn(lambda m, x: m.r(x)[0], r=nn.GRU(3, 4, batch_first=True)).eval()
    first = Fn(lambda m, x: m.made(x), made=program_of(net, torch.randn(2, 5, 3)).module())
    again = program_of(first, torch.randn(2, 5, 3))
    x = torch.randn(3, 40, 3)
    torch.testing.assert_close(through_pt2(again)(x), net(x))


def test_a_recurrent_call_under_autocast_is_torchs_own_again():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.r(x)[0]

    net = Fn(forward, r=nn.LSTM(3, 4, batch_first=True)).eval()
    program, x = program_of(net, torch.randn(2, 5, 3)), torch.randn(3, 9, 3)
    code = "".join(str(module.graph) for module in program.graph_module.modules())
    assert "aten.lstm.input" in code
    assert "l0prune" not in code
    torch.testing.assert_close(program.module()(x), net(x))
