"""Transforms of torch.func in a forward: written out in the program, or refused with a reason."""

from __future__ import annotations

import pytest
import torch
from differences import difference
from networks import TOKENS, Fn
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import l0prune
from l0prune.capture.capture import capture
from l0prune.errors import CaptureError


def nested(m, x):
    """Outer products of two tokens each, by one function of two vectors."""
    y = m.a(x)
    return torch.vmap(torch.vmap(torch.outer, (0, None)), (0, 0))(y, y[:, 0])


def of_each_example(m, x):
    return torch.vmap(lambda one: m.a(one).tanh())(x)


@pytest.mark.parametrize("forward", [nested, of_each_example])
@pytest.mark.parametrize("dynamic", [False, True])
def test_vmap_becomes_operators_on_whole_tensors(forward, dynamic):
    module, x = Fn(forward, a=nn.Linear(32, 6)).eval(), torch.randn(TOKENS)
    captured = capture(module, (x,), dynamic_batch=dynamic)
    assert captured.dynamic is dynamic
    assert all("nesting" not in str(node.target) for node in captured.graph.nodes)
    assert all("batch_dim" not in str(node.target) for node in captured.graph.nodes)
    torch.testing.assert_close(captured.program.module()(x), module(x))
    if dynamic:
        more = torch.randn(7, *TOKENS[1:])
        torch.testing.assert_close(captured.program.module()(more), module(more))


@pytest.mark.parametrize(
    "slope",
    [
        lambda y: torch.func.grad(lambda t: t.pow(3).sum())(y),
        lambda y: torch.func.vjp(torch.sin, y)[1](torch.ones_like(y))[0],
    ],
    ids=["grad", "vjp"],
)
def test_a_gradient_that_torch_export_loses_is_refused_with_the_reason(slope):
    module = Fn(lambda m, x: m.b(slope(m.a(x))), a=nn.Linear(32, 6), b=nn.Linear(6, 3))
    with pytest.raises(CaptureError, match="a gradient that a forward takes of itself"):
        l0prune.survey(module, (torch.randn(TOKENS),))


@pytest.mark.slow
def test_an_attention_with_a_function_for_scores_is_pinned_and_all_else_is_cut():
    def forward(m, x):
        q, k, v = (f(x).view(2, 16, 2, 4).transpose(1, 2) for f in (m.q, m.k, m.v))
        y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1)
        return m.out(m.inner(y.transpose(1, 2).flatten(2)).relu())

    layers = {name: nn.Linear(12, 8) for name in "qkv"}
    module = Fn(forward, **layers, inner=nn.Linear(8, 6), out=nn.Linear(6, 3))
    x = torch.randn(2, 16, 12)
    module.eval().requires_grad_(False)
    l0prune.gate(module, (x,))
    bank = l0prune.gates(module)
    assert {"inner": 6}.items() <= {axis.name: axis.size for axis in bank.plan.axes}.items()
    reasons = {pin.where: pin.reason for pin in bank.plan.pins}
    assert "operator flex_attention at test_transforms.py" in reasons["q.weight dim 0"]
    with torch.no_grad():
        bank.log_alpha[::2] = -5.0
    assert difference(module, l0prune.export(module), x) <= 1e-6
