"""Slots in another order, cut: the numbers that say which order are those of what is left."""

from __future__ import annotations

import pytest
import torch
from differences import difference, graph_difference
from networks import Fn
from torch import nn

import l0prune
from l0prune.infer.nodes import operator_name

OPERATORS = ("aten.flip", "aten.roll", "aten.index", "aten.index_select")


def exported(reorder, closed: list[int]) -> l0prune.Export:
    """Of the numbers 1 to 8 in another order, read as the digits of one number."""
    first, last = nn.Linear(1, 8, bias=False), nn.Linear(8, 1, bias=False)
    first.weight.data = torch.arange(1.0, 9.0)[:, None]
    last.weight.data = 10.0 ** torch.arange(7.0, -1.0, -1.0)[None]
    model = Fn(lambda m, x: m.b(reorder(m.a(x))), a=first, b=last).double()
    l0prune.gate(model, (torch.randn(2, 1).double(),))
    bank = l0prune.gates(model)
    with torch.no_grad():
        bank.log_alpha.fill_(20.0)
        bank.log_alpha[closed] = -20.0
    return l0prune.export(model.eval())


def call_of(dense: l0prune.Export) -> torch.fx.Node:
    calls = dense.program.graph.nodes
    return next(node for node in calls if operator_name(node.target) in OPERATORS)


@pytest.mark.parametrize(
    ("reorder", "digits"),
    [
        (lambda h: h.flip(1), 80600301),
        (lambda h: h.roll(3, 1), 60810300),
        (lambda h: h[:, [7, 6, 4, 5, 3, 2, 1, 0]], 80060301),
        (lambda h: h.index_select(1, torch.tensor([7, 7, 4, 5, 0, 0, 1, 2])), 88061103),
    ],
)
@pytest.mark.one_in(4)
def test_what_is_left_stands_where_it_stood(reorder, digits):
    """2, 4, 5 and 7 are gone: a zero stands in their places."""
    dense = exported(reorder, [1, 3, 4, 6])
    assert dense.module(torch.ones(1, 1).double()).item() == pytest.approx(digits, rel=1e-12)
    assert dense.params < dense.params_before


def test_a_roll_goes_as_far_as_slots_are_left():
    """Of the last three, of which 6, 7 and 8 come first, 6 and 8 are left."""
    assert call_of(exported(lambda h: h.roll(3, 1), [1, 3, 4, 6])).args[1] == [2]


def test_an_index_names_the_new_places():
    dense = exported(lambda h: h[:, [7, 6, 4, 5, 3, 2, 1, 0]], [1, 3, 4, 6])
    (index,) = [b for name, b in dense.module.named_buffers() if "picked_by" in name]
    assert index.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("some", [[1, 1], [1, 3]])
@pytest.mark.one_in(4)
def test_of_channels_that_are_picked_one_stays(some, groups):
    """A convolution takes no image of 0 channels: what is picked of closed ones keeps one."""
    layers = {
        "a": nn.Conv2d(3, 4, 3),
        "b": nn.Conv2d(2, 6, 3, groups=groups),
        "c": nn.Conv2d(6, 2, 1),
    }
    model = Fn(lambda m, x: m.c(torch.relu(m.b(m.a(x)[:, some]))), **layers).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    bank = l0prune.gates(l0prune.gate(model, (x,)))
    with torch.no_grad():
        bank.log_alpha.fill_(20.0)
        bank.log_alpha[bank.axes[0].slice.start + torch.tensor(some)] = -20.0
    small = l0prune.export(model)
    assert small.widths[bank.axes[0].name] == (4 - len(set(some)) + 1, 4)
    assert difference(model, small, x) <= 1e-12
    assert graph_difference(model, small, x) <= 1e-12


@pytest.mark.parametrize(
    "one", [lambda h: h[:, [1]], lambda h: h.flip(1)[:, :1], lambda h: h.flip(1).chunk(8, 1)[2]]
)
def test_a_single_slot_that_is_picked_stays_with_all_of_its_axis(one):
    """It may be stretched, or folded into positions: there a dim of one says nothing of slots."""
    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Linear(36, 3), "c": nn.Conv2d(8, 2, 1)}
    model = Fn(lambda m, x: (m.b(one(h := m.a(x)).flatten(1)), m.c(h)), **layers)
    found = l0prune.survey(model, (torch.randn(2, 3, 6, 6),))
    assert {axis.kind for axis in found.axes} <= {"input"}  # a pixel that b reads, and no channel
    assert "single positions" in next(la for la in found.layers if la.name == "a").output.reason
