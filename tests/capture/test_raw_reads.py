"""Reads of what ``named_parameters()`` and ``state_dict()`` hand out are noted in a graph."""

import torch
from networks import Fn
from torch import nn
from torch.func import functional_call

from l0prune.capture.capture import capture
from l0prune.capture.raw_reads import BY_NAME, OF_STATE, raw_reads

X = torch.randn(2, 4)


def found(forward, **layers):
    """The operators and stored tensors of the noted reads, by the way of the read."""
    graph = capture(Fn(forward, **layers).eval(), (X,)).graph
    assert not [n for n in graph.nodes if str(n.target).endswith(("view_as.default", "expand_as"))]
    return {
        key: [(node.name, of.name) for node in graph.nodes for of in raw_reads(node, key).values()]
        for key in (BY_NAME, OF_STATE)
    }


def test_only_values_that_are_handed_out_are_noted():
    def forward(m, x):
        y = m.a(x) + next(m.a.parameters()).new_ones(3)
        return y * dict(m.a.named_parameters())["bias"].exp()

    reads = found(forward, a=nn.Linear(4, 3))
    assert ("exp", "p_a_bias") in reads[BY_NAME]
    assert not [each for each in reads[BY_NAME] if each[0] == "linear"]
    assert reads[OF_STATE] == []


def test_fast_weights_are_read_so_and_the_plain_call_is_not():
    def forward(m, x):
        fast = {name: p * 2 for name, p in m.a.named_parameters()}
        return functional_call(m.a, fast, (x,)) + m.a(x)

    reads = found(forward, a=nn.Linear(4, 3))
    assert reads == {BY_NAME: [("mul", "p_a_weight"), ("mul_1", "p_a_bias")], OF_STATE: []}


def test_a_state_is_told_from_them_and_buffers_count():
    def forward(m, x):
        x = m.n(x) * next(m.n.buffers())
        return x @ m.a.state_dict()["weight"].t()

    reads = found(forward, a=nn.Linear(4, 3), n=nn.BatchNorm1d(4))
    assert [name for _, name in reads[BY_NAME]] == ["b_n_running_mean"]
    assert reads[OF_STATE] == [("t", "p_a_weight")]


def test_parts_under_a_mode_are_looked_into():
    def forward(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = m.a(x) + next(p for p in m.a.parameters() if p.ndim == 1) * 2
        return m.b(y.float())

    reads = found(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    assert [name for _, name in reads[BY_NAME]] == ["p_a_bias"]


def test_modules_hand_out_their_parameters_again_afterwards():
    layer = nn.Linear(4, 3)
    found(lambda m, x: m.a(x), a=layer)
    assert [p is q for p, q in zip(layer.parameters(), (layer.weight, layer.bias), strict=True)]
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
