"""A graph in the place of a module: copies, pickles and the original are alike."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from differences import as_graph
from networks import Fn
from round_trips import through_torch
from torch import nn

import l0prune
from l0prune.capture.copying import copied
from l0prune.exporting.slicing.graph import DenseGraph


class Both(NamedTuple):
    logits: torch.Tensor
    hidden: dict[str, torch.Tensor]


class Scores(nn.Module):
    """Its forward computes with a size, so that only the graph can stand for it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, batch, n, mask=None):
        h = torch.relu(self.a(batch["x"]))
        h = h / h.shape[-1]
        scores = self.b(h) * n + batch["y"]
        return Both(scores if mask is None else scores * mask, {"h": h.sum(1)})


@pytest.fixture(scope="module")
def gated():
    torch.manual_seed(0)
    model = l0prune.gate(Scores().eval(), (given(2), 3, None))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return model


@pytest.fixture(scope="module")
def graph(gated):
    small = l0prune.export(gated)
    assert isinstance(small.module, DenseGraph)
    return small.module


def given(rows, columns=4):
    return {"x": torch.randn(rows, columns), "y": torch.randn(rows, 3)}


WAYS = {
    "original": lambda module: module,
    "deepcopy": copy.deepcopy,
    "copied": copied,
    "pickled": through_torch,
    "copy of the pickled": lambda module: copy.deepcopy(through_torch(copied(module))),
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_and_pickles_compute_the_same(way, gated, graph):
    module, batch = WAYS[way](graph), given(5)
    found, expected = module(batch, 3, None), gated(batch, 3, None)
    assert type(found) is Both
    torch.testing.assert_close(found, expected)
    assert list(module.state_dict()) == list(graph.state_dict())
    assert not module.training


@pytest.mark.parametrize("way", WAYS)
def test_copies_and_pickles_refuse_what_they_were_not_captured_for(way, graph):
    module, batch = WAYS[way](graph), given(2)
    with pytest.raises(RuntimeError, match="n has to be 3, as when this graph was captured"):
        module(batch, 5, None)
    with pytest.raises(RuntimeError, match="mask has to be None"):
        module(batch, 3, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="dim 0 of batch_y has to measure what batch_x does"):
        module({**batch, "y": torch.zeros(1, 3)}, 3, None)
    with pytest.raises(RuntimeError, match="dim 1 of batch_x has to measure 4"):
        module(given(2, 8), 3, None)
    with pytest.raises(RuntimeError, match="batch_x has to have 2 dims"):
        module({**batch, "x": torch.zeros(2, 2, 4)}, 3, None)


def test_a_program_made_of_it_refuses_the_same(graph):
    program = torch.export.export(copy.deepcopy(graph), (given(2), 3, None))
    with pytest.raises((RuntimeError, AssertionError)):
        program.module()(given(2), 5, None)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.slow
def test_a_graph_with_a_recurrent_cell_runs_with_gradients_recorded(kind):
    def forward(m, x):
        state = m.cell(torch.relu(m.a(x)))
        return m.out(state[0] if isinstance(state, tuple) else state)

    torch.manual_seed(0)
    model = Fn(forward, a=nn.Linear(4, 8), cell=kind(8, 6), out=nn.Linear(6, 2)).eval()
    l0prune.gate(model, torch.randn(2, 4))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    with as_graph():
        module, x = l0prune.export(model).module, torch.randn(3, 4)
    assert isinstance(module, DenseGraph)
    torch.testing.assert_close(module(x), model(x))
