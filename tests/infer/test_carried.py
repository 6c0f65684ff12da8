"""Stored tensors that carry values from one call to the next, told from a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l0prune.infer.dataflow import carried


class Net(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step, self.layer = step, nn.Linear(4, 6)
        self.register_buffer("past", torch.arange(12.0).view(2, 6))
        self.register_buffer("other", torch.zeros(2, 6))

    def forward(self, x):
        return self.step(self, self.layer(x))


def read_then_replaced(m, h):
    result = h + m.past
    m.past = h
    return result


def overwritten_then_read(m, h):
    m.past.copy_(h)
    m.other.zero_()
    m.other.add_(h)
    return m.past * m.other


def overwritten_by_itself(m, h):
    m.past.copy_(m.past.roll(1, 0))
    return m.past * h


def counted(m, h):
    m.past += 1
    return h


def a_slice(m, h):
    result = h + m.past
    m.past[:, :3] = h[:, :3]
    return result


def by_another(m, h):
    """Keeps in one buffer what it kept in the other a call ago."""
    result = h * m.past
    m.past.copy_(m.other)
    m.other.copy_(h)
    return result


def read_alone(m, h):
    return h + m.past


KINDS = {
    read_then_replaced: ["past"],
    overwritten_then_read: [],
    overwritten_by_itself: ["past"],
    counted: [],
    a_slice: ["past"],
    by_another: ["past", "other"],
    read_alone: [],
}


@pytest.mark.parametrize("step", KINDS, ids=lambda step: step.__name__)
def test_state(step):
    program = torch.export.export(Net(step).eval(), (torch.randn(2, 4),), strict=False)
    names = {**program.graph_signature.inputs_to_buffers}
    names |= program.graph_signature.inputs_to_parameters
    nodes = [n for n in program.graph.find_nodes(op="placeholder") if n.name in names]
    assert [names[node.name] for node in carried(program.graph, nodes)] == KINDS[step]
    # the same by running it: the second call answers otherwise than the first
    model, x = Net(step).eval(), torch.randn(2, 4)
    answers = [model(x) for _ in range(3)]
    assert bool(KINDS[step]) == any(not torch.equal(answers[0], each) for each in answers)
