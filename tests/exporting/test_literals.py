"""Numbers that the cut must not change: divisors of means, ε of norms, sizes of groups."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from differences import as_graph, difference, in_float64
from example_counts import costly
from hypothesis import given
from hypothesis import strategies as st
from networks import Fn, conv
from torch import nn

import l0prune
from l0prune.infer.nodes import operator_name


def cut(model: nn.Module, x: torch.Tensor, closed: list[int]) -> l0prune.Export:
    """The export with these slots of the first axis closed, and every other gate open."""
    l0prune.gate(model, (x,))
    bank = l0prune.gates(model)
    with torch.no_grad():
        bank.log_alpha.fill_(20.0)
        bank.log_alpha[bank.axes[0].slice][closed] = -20.0
    return l0prune.export(model.eval())


def calls(dense: l0prune.Export, operator: str) -> list[torch.fx.Node]:
    nodes = dense.program.graph.find_nodes
    found = {n.target for n in dense.program.graph.nodes if operator_name(n.target) == operator}
    return [node for target in found for node in nodes(op="call_function", target=target)]


@pytest.mark.slow
def test_a_mean_keeps_its_divisor():
    """With weights of one: (1 + 2 + 4) / 4 is what is left of (1 + 2 + 3 + 4) / 4 without 3."""
    layer = nn.Linear(1, 4, bias=False)
    layer.weight.data = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    model = Fn(lambda m, x: m.a(x).mean(1, keepdim=True), a=layer)
    dense = cut(model, torch.randn(2, 1), [2])
    assert dense.module(torch.ones(1, 1)).item() == pytest.approx(7 / 4, abs=1e-7)
    assert [axis.size for axis in l0prune.gates(model).axes] == [4]


@pytest.mark.parametrize(
    "filters",
    [
        lambda m, y: m.f.expand(y.shape[1], -1, -1),
        lambda m, y: m.f.repeat(y.shape[1], 1, 1),
        lambda m, y: m.f.repeat_interleave(4, 0),
        lambda m, y: m.f[0].tile(4, 1, 1),
    ],
)
@pytest.mark.one_in(4)
def test_a_stored_filter_is_copied_for_the_channels_that_stay(filters):
    """Filtered by (1, 1, 1) the channels are 3 (1 + 2 + 4) without the third, not 3 · 10."""
    a, b = nn.Conv1d(1, 4, 1, bias=False), nn.Conv1d(4, 1, 1, bias=False)
    a.weight.data, b.weight.data = torch.arange(1.0, 5).view(4, 1, 1), torch.ones(1, 4, 1)
    run = lambda m, x: m.b(F.conv1d(y := m.a(x), filters(m, y), groups=4))  # noqa: E731
    model = Fn(run, a=a, f=torch.ones(1, 1, 3), b=b)
    dense = cut(model, torch.randn(2, 1, 3), [2])
    assert dense.program.module()(torch.ones(1, 1, 3)).item() == pytest.approx(21, abs=1e-5)
    assert [axis.size for axis in l0prune.gates(model).axes] == [4]
    assert [node.meta["val"].shape[1] for node in calls(dense, "aten.conv1d")] == [3, 3, 1]


@pytest.mark.parametrize(
    ("statistic", "answer"),
    [
        (lambda h: h.var(1, keepdim=True), 35 / 12),
        (lambda h: h.std(1, unbiased=False, keepdim=True), (35 / 16) ** 0.5),
        (lambda h: torch.var_mean(h, 1, correction=0)[0][:, None], 35 / 16),
        (lambda h: torch.std_mean(h, 1, keepdim=True)[1], 7 / 4),
        (lambda h: h.exp().sum(1, keepdim=True), sum(math.exp(x) for x in (1, 2, 0, 4))),
        (lambda h: h.cos().mean(1, keepdim=True), sum(math.cos(x) for x in (1, 2, 0, 4)) / 4),
        (lambda h: (h - h.mean(1, keepdim=True)).abs().sum(1, keepdim=True), 5.0),
        (lambda h: (h - 1).var(1, keepdim=True), 35 / 12),
    ],
)
@pytest.mark.one_in(3)
def test_a_statistic_counts_what_went(statistic, answer):
    """Of 1, 2, 3 and 4 without 3: a zero stands in its place."""
    layer = nn.Linear(1, 4, bias=False)
    layer.weight.data = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    dense = cut(Fn(lambda m, x: statistic(m.a(x)), a=layer), torch.randn(2, 1), [2])
    assert dense.params == 3
    assert dense.module(torch.ones(1, 1)).item() == pytest.approx(answer, rel=1e-6)


@pytest.mark.slow
def test_a_mean_over_whole_dims_is_left_alone():
    model = Fn(lambda m, x: m.b(m.a(x).mean((2, 3))), a=conv(3, 8), b=nn.Linear(8, 2))
    dense = cut(model, torch.randn(2, 3, 6, 6), [0, 5])
    assert not calls(dense, "aten.mul")


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.one_in(2)
def test_an_rms_norm_gets_another_epsilon_and_weight(weight):
    norm = nn.RMSNorm(8, eps=0.5, elementwise_affine=weight)
    model = Fn(lambda m, x: m.c(m.n(m.a(x))), a=nn.Linear(5, 8), n=norm, c=nn.Linear(8, 3))
    with as_graph():
        (call,) = calls(cut(model, torch.randn(2, 5), [1, 3, 4, 6, 7]), "aten.rms_norm")
    assert call.args[1] == [3]
    assert call.args[3] == pytest.approx(0.5 * 8 / 3)
    scaled = call.args[2] if weight else next(iter(call.users))
    assert scaled.args[1] == pytest.approx((8 / 3) ** 0.5)


@pytest.mark.slow
def test_an_epsilon_of_the_dtype_stays_one():
    """It is 1e-7 in float32 and 2e-16 in float64, and matters as much as values of its size."""
    model = Fn(
        lambda m, x: m.c(m.n(m.a(x) * 1e-4)),
        a=nn.Linear(5, 8),
        n=nn.RMSNorm(8),
        c=nn.Linear(8, 3),
    )
    x = torch.randn(2, 5)
    dense = cut(model, x, [1, 3, 4])
    (call,) = calls(dense, "aten.rms_norm")
    assert len(call.args) < 4  # eps is not given
    model, x = in_float64(l0prune.ungate(model), x)
    assert difference(model, cut(model, x, [1, 3, 4]), x) <= 1e-12


def test_group_norm_counts_the_groups_that_stay():
    model = nn.Sequential(conv(3, 12), nn.GroupNorm(4, 12), nn.ReLU(), conv(12, 2))
    dense = cut(model, torch.randn(2, 3, 6, 6), [1])
    (call,) = calls(dense, "aten.group_norm")
    assert call.args[1] == 3
    assert dense.widths == {"0.groups": (3, 4)}


NORMS = {
    "fused": lambda h, w, eps: F.rms_norm(h, h.shape[-1:], w, eps),
    "by hand": lambda h, w, eps: w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)),
    "length": lambda h, w, eps: w * F.normalize(h, dim=-1, eps=eps),
}


@costly
@given(
    st.sampled_from(sorted(NORMS)),
    st.integers(2, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=n))
    ),
    st.sampled_from([1e-6, 1e-3, 1.0]),
)
@pytest.mark.slow
def test_a_norm_over_what_stays_is_the_norm_over_all(name, widths, eps):
    """Against the whole network in which the rows of closed slots are zero."""
    size, closed = widths
    torch.manual_seed(0)
    model = Fn(
        lambda m, x: m.c(NORMS[name](m.a(x), m.w, eps)),
        a=nn.Linear(4, size),
        w=nn.Parameter(torch.rand(size)),
        c=nn.Linear(size, 3),
    )
    with torch.no_grad():
        layer = nn.Linear(4, size)
        layer.load_state_dict(model.a.state_dict())
        layer.weight[closed] = 0
        layer.bias[closed] = 0
        x = torch.randn(7, 4)
        expected = model.c(NORMS[name](layer(x), model.w, eps))
        dense = cut(model, torch.randn(2, 4), closed)
        torch.testing.assert_close(dense.module(x), expected, rtol=1e-5, atol=1e-6)
    assert dense.widths["a"][0] == max(size - len(set(closed)), 1)
