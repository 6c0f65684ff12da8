"""What is written at the positions where a condition holds is written by a mask in the graph."""

from __future__ import annotations

import pytest
import torch
from deadness import randomise
from differences import difference, in_float64
from networks import Fn
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.errors import CaptureError


def by_where(m, x):
    mask = m.a(x) < 0
    mask[torch.where(mask.sum(-1) > 4)] = False
    return m.b(torch.relu(m.c(x)) * mask.any(-1, keepdim=True))


def by_nonzero(m, x):
    h = torch.relu(m.c(x))
    condition = m.a(x).sum(-1)
    rows, columns = (condition * (condition > 0)).nonzero(as_tuple=True)
    h[rows, columns] = 0.0
    return m.b(h)


def of_what_changes(m, x):
    """The positions are those before the first of two writes at them."""
    h = torch.relu(m.c(x))
    condition = m.a(x).sum(-1) > 0
    where = torch.where(condition)
    condition[where] = False
    h[where] = 0.0
    return m.b(h) + condition[..., None]


def network(forward):
    layers = {n: nn.Linear(8, 8) for n in "abc"}
    model = randomise(Fn(forward, **layers)).eval()
    return in_float64(model, torch.randn(2, 5, 8))


@pytest.mark.parametrize("forward", [by_where, by_nonzero, of_what_changes])
def test_the_graph_writes_by_a_mask(forward):
    model, x = network(forward)
    program = capture(model, (x,)).program
    names = [str(node.target) for node in program.graph.nodes]
    assert not any("where" in name or "nonzero" in name for name in names)
    assert any("masked_fill" in name for name in names)
    other = torch.randn_like(x)
    assert torch.equal(program.module()(other), model(other))


@pytest.mark.slow
def test_it_is_cut_exactly():
    model, x = network(by_where)
    l0prune.gate(model, (x,))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert difference(model, small, x) <= 1e-12
    assert small.params < sum(p.numel() for p in model.parameters())


def read(m, x):
    return m.b(x)[torch.where(m.a(x).sum(-1) > 0)].sum()


def each_its_own(m, x):
    h = torch.relu(m.c(x))
    where = torch.where(h.sum(-1) > 0)
    h[where] = m.a(x)[where]
    return m.b(h)


def crossed(m, x):
    h = torch.relu(m.c(x))[:, :2]
    rows, columns = torch.where(h.sum(-1) > 0)
    h[columns, rows] = 0.0
    return m.b(h)


@pytest.mark.parametrize("forward", [read, each_its_own, crossed])
def test_any_other_use_of_positions_is_refused(forward):
    model, x = network(forward)
    with pytest.raises(CaptureError, match="values of the input decide"):
        capture(model, (x,))
