"""What a forward does with autocast off is part of the graph like everything else."""

from __future__ import annotations

import pytest
import torch
from deadness import randomise
from differences import difference, in_float64
from networks import Fn
from torch import nn

import l0prune
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
    dense = l0prune.export(model)
    assert difference(model, dense, x) <= 1e-12
    assert dense.params < found.params


def test_operators_under_autocast_stay_apart():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.a(x)
        return m.b(y.float())

    model = Fn(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    found = l0prune.survey(model, (torch.randn(2, 4),))
    assert found.reachable("macs") == 0
    assert "wrap_with_autocast" in found.layers[0].output.reason
