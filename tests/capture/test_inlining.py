"""What a forward does under a mode of its own is part of the graph like everything else."""

from __future__ import annotations

import pytest
import torch
from deadness import randomise
from differences import ROUNDED, difference, in_float64
from networks import Fn
from torch import nn

import l0prune
from l0prune.capture import inlining
from l0prune.capture.capture import capture


def without_autocast(m, x):
    x = torch.relu(m.a(x))
    with torch.autocast("cpu", enabled=False):
        y = torch.relu(m.b(x)) * 2
        with torch.autocast("cpu", enabled=False):
            z = y + m.c(y)
    return m.d(z) + z.sum(-1, keepdim=True)


def ending_inside(m, x):
    with torch.autocast("cpu", enabled=False):
        return m.d(torch.relu(m.a(x)))


@pytest.mark.parametrize("forward", [without_autocast, ending_inside])
def test_operators_under_a_mode_are_seen_and_cut(forward):
    layers = {n: nn.Linear(10 if n == "a" else 8, 3 if n == "d" else 8) for n in "abcd"}
    model, x = in_float64(randomise(Fn(forward, **layers)).eval(), torch.randn(2, 10))
    program = capture(model, (x,)).program
    assert not any("wrap_with" in str(node.target) for node in program.graph.nodes)
    assert torch.allclose(program.module()(x), model(x))
    found = l0prune.survey(model, (x,))
    assert found.reachable("macs") == 1
    l0prune.gate(model, (x,))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert difference(model, small, x) <= 1e-12
    assert small.params < found.params


def under_autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.relu(m.norm(m.a(x)))
        with torch.no_grad():
            y = y + torch.tanh(m.b(y))
        with torch.autocast("cpu", enabled=False):
            z = m.c(y.float())
        z = torch.sigmoid(z) + torch.cat([y, z], -1)[..., :8]
    return m.d(z.float())


@pytest.mark.slow
def test_the_casts_of_autocast_are_nodes_of_the_graph():
    layers = {n: nn.Linear(10 if n == "a" else 8, 3 if n == "d" else 8) for n in "abcd"}
    model = randomise(Fn(under_autocast, norm=nn.LayerNorm(8), **layers)).eval()
    x = torch.randn(5, 10)
    program = capture(model, (x,)).program
    assert not any("wrap_with" in str(node.target) for node in program.graph.nodes)
    assert list(program.graph_module.children()) == []
    assert torch.equal(program.module()(x), model(x))
    assert l0prune.survey(model, (x,)).reachable("macs") == 1
    l0prune.gate(model, (x,))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert difference(model, small, x) <= ROUNDED
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(x), model(x), atol=0.02, rtol=0.02)


def test_what_autocast_does_beside_casts_stays_apart(monkeypatch):
    """Where an operator gives another dtype than its cast operands make it give."""
    monkeypatch.setattr(inlining, "_dtypes", lambda result: [object()])
    layers = {n: nn.Linear(10 if n == "a" else 8, 3 if n == "d" else 8) for n in "abcd"}
    model, x = Fn(under_autocast, norm=nn.LayerNorm(8), **layers), torch.randn(2, 10)
    found = l0prune.survey(model, (x,))
    assert "torch.autocast" in found.layers[0].output.reason
