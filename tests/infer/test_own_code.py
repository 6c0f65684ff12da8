"""What the modules' own code says: numbers, averages, and what queries are made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import Fn
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning, NothingToPrune
from l0prune.infer.parts import inferred
from l0prune.plan.layout import show


class Heads(nn.Module):
    """Queries and keys share their axis; values have one of their own, called by one number."""

    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.head_size, self.unrelated = dim // heads, 7
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        shape = (*x.shape[:2], -1, self.head_size)
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(x.reshape(*x.shape[:2], -1))


def plan_of(module, *x):
    return inferred(module, x, None).plan


def shown(plan, dims):
    return [show(dim, plan.names) for dim in dims]


@pytest.mark.slow
def test_sizes_that_one_attribute_gives_are_kept_alike():
    plan = plan_of(nn.Sequential(Heads()), torch.randn(2, 5, 12))
    assert shown(plan, plan.code.sizes["0"]) == ["0.q.head_dim", "0.v.head_dim"]
    assert [shown(plan, dims) for dims in plan.alike] == [["0.q.head_dim", "0.v.head_dim"]]


class Grouped(nn.Module):
    """Two groups of two layers' outputs, of which the code knows how many a group has."""

    def __init__(self):
        super().__init__()
        self.groups, self.members = nn.Linear(8, 6), nn.Linear(8, 6)
        self.out, self.of_a_group = nn.Linear(12, 8), 2

    def forward(self, x):
        rows, places, _ = x.shape
        groups = self.groups(x).unflatten(-1, (-1, 3))
        members = self.members(x).view(rows, places, 1, self.of_a_group, 3)
        sizes = rows, places, groups.shape[2], self.of_a_group, 3
        return self.out((groups[:, :, :, None].expand(sizes) * members).flatten(2))


def test_two_equal_sizes_of_one_tensor_are_two_numbers():
    plan = plan_of(Grouped(), torch.randn(2, 5, 8))
    assert [axis.name for axis in plan.axes if axis.size == 2] == ["groups", "members"]
    assert plan.alike == ()


def test_an_axis_that_is_as_wide_as_one_without_gates_stays_whole_from_the_start():
    model, x = nn.Sequential(Heads()), torch.randn(2, 5, 12)
    with pytest.warns(L0pruneWarning, match=r"0\.q\.head_dim cannot be cut alone, and stays whole"):
        l0prune.gate(model, x, include=["0.q.head_dim", "*.heads*"])
    assert "0.q.head_dim" not in l0prune.gates(model).plan.names
    with pytest.raises(NothingToPrune), pytest.warns(L0pruneWarning, match="one number"):
        l0prune.gate(nn.Sequential(Heads()), x, include=["0.q.head_dim"])


def test_sizes_that_no_attribute_gives_are_not():
    module = Heads()
    module.head_size = nn.Parameter(torch.zeros(4)).shape[0]
    del module.head_size
    Heads.head_size = 4  # a number of the class's code, which no export can change
    try:
        assert plan_of(module, torch.randn(2, 5, 12)).alike == ()
    finally:
        del Heads.head_size


def test_a_size_that_an_input_has_is_no_number_of_the_code():
    """What a module can read off its input comes right by itself, so the number is the other's."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = 8
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            flat = x.reshape(-1, x.shape[-1])
            return torch.mm(flat, self.weight).view(*x.shape[:-1], self.width)

    net = nn.Sequential(nn.Linear(4, 8), Product(), nn.Linear(8, 3))
    plan = plan_of(net, torch.randn(2, 5, 4))
    assert shown(plan, plan.code.sizes["1"]) == ["1"]


@pytest.mark.slow
def test_pieces_of_one_size_stay_alike():
    net = Fn(
        lambda m, x: m.out(torch.mul(*m.a(x).chunk(2, -1)) * m.a(x).chunk(2, -1)[0].sigmoid()),
        a=nn.Linear(4, 12),
        out=nn.Linear(6, 2),
    )
    two = Fn(
        lambda m, x: m.b(m.a(x).chunk(2, -1)[0]) + m.c(m.a(x).chunk(2, -1)[1]),
        a=nn.Linear(4, 12),
        b=nn.Linear(6, 2),
        c=nn.Linear(6, 2),
    )
    assert plan_of(net, torch.randn(2, 4)).alike == ()  # one axis
    plan = plan_of(two, torch.randn(2, 4))
    assert [shown(plan, dims) for dims in plan.alike] == [["a", "a#2"]]


def test_modules_that_average_over_an_axis_with_the_dims_of_their_input():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.LayerNorm(3))
    plan = plan_of(net, torch.randn(2, 5, 4))
    assert {path: shown(plan, dims) for path, dims in plan.code.averages.items()} == {
        "1": ["·2", "·5", "0"]
    }


def attention(make_query, **modules):
    def forward(m, x):
        q = make_query(m, x)
        k, v = (each(x).unflatten(-1, (3, 4)).transpose(1, 2) for each in (m.k, m.v))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return m.out(x)

    layers = {name: nn.Linear(12, 12) for name in ("k", "v", "out")}
    return Fn(forward, **layers, **modules)


def split(x):
    return x.unflatten(-1, (3, 4)).transpose(1, 2)


def rotated(q):
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.5]).repeat(2)
    half = torch.cat([-q[..., 2:], q[..., :2]], -1)
    return q * angles.cos() + half * angles.sin()


def unit(q):
    return q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


QUERIES = {
    "linear": (lambda m, x: split(m.q(x)), {"q": nn.Linear(12, 12)}),
    "fused": (lambda m, x: split(m.q(x).chunk(3, -1)[1]), {"q": nn.Linear(12, 36)}),
    "interleaved": (
        lambda m, x: m.q(x).reshape(2, 5, 3, 8)[..., 4:].permute(0, 2, 1, 3),
        {"q": nn.Linear(12, 24)},
    ),
    "rotary": (lambda m, x: rotated(split(m.q(x))), {"q": nn.Linear(12, 12, bias=False)}),
    "normalised": (
        lambda m, x: m.norm(split(m.q(x))),
        {"q": nn.Linear(12, 12), "norm": nn.LayerNorm(4)},
    ),
    "normalised by hand": (
        lambda m, x: unit(split(m.q(x))) * m.norm_gain,
        {"q": nn.Linear(12, 12), "norm_gain": nn.Parameter(torch.randn(4))},
    ),
    "conv1d of a language model": (
        lambda m, x: split(torch.addmm(m.b, x.reshape(-1, 12), m.w).view(2, 5, 12)),
        {"b": nn.Parameter(torch.randn(12)), "w": nn.Parameter(torch.randn(12, 12))},
    ),
}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.one_in(2)
def test_rows_that_queries_are_made_of(name):
    """Scaling them, and nothing less, scales the queries: as autograd sees it."""
    torch.manual_seed(0)
    make_query, modules = QUERIES[name]
    net, x = attention(make_query, **modules), torch.randn(2, 5, 12)
    rows: dict[str, set[int]] = {}
    dims = {}
    for factor in plan_of(net, x).code.queries:
        rows[factor.tensor] = {p for start, stop in factor.ranges for p in range(start, stop)}
        dims[factor.tensor] = factor.dim
    parameters = dict(net.named_parameters())
    query = make_query(net, x)
    query.square().sum().backward()
    reached = [n for n, p in parameters.items() if p.grad is not None]
    expected = {
        n: {p for p in range(len(g)) if bool(g[p].any())}
        for n in [n for n in reached if n.startswith("norm")] or reached
        for g in [parameters[n].grad.movedim(1 if n == "w" else 0, 0)]
    }
    assert rows == expected
    with torch.no_grad():
        for n, positions in rows.items():
            parameters[n].movedim(dims[n], 0)[list(positions)] *= 3
        torch.testing.assert_close(make_query(net, x), 3 * query)


@pytest.mark.slow
def test_a_network_may_be_deeper_than_calls_can_be():
    def deep(m, x):
        q = m.a(x).unflatten(-1, (3, -1)).transpose(1, 2)
        k = v = m.k(x).unflatten(-1, (3, -1)).transpose(1, 2)
        for _ in range(1200):
            q = -q
        return m.b(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    net = Fn(deep, **{name: nn.Linear(12, 12) for name in "akb"})
    factors = plan_of(net, torch.randn(2, 5, 12)).code.queries
    assert {factor.tensor for factor in factors} == {"a.weight", "a.bias"}


UNSCALED = {  # by scaling the layer "q" or the parameter "gain"
    "a key is the query": lambda m, q: (q, q),
    "a key is of the query's layer": lambda m, q: (q, split(m.q(torch.ones(2, 5, 12)))),
    "a key has the same factor": lambda m, q: (q * m.gain, q.detach() * 0 + m.gain),
    "a divisor": lambda m, q: (q / m.gain, None),
    "of unit length": lambda m, q: (q / q.norm(dim=-1, keepdim=True), None),
    "a sum with a constant": lambda m, q: (q + 1, None),
    "a sum with what has no parameters": lambda m, q: (q + torch.ones(2, 3, 5, 4), None),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_queries_that_no_parameter_scales_alone(name):
    """No rows are given for them, so that their call is given the scale."""

    def forward(m, x):
        q, k = UNSCALED[name](m, split(m.q(x)))
        k, v = (split(m.k(x)) if k is None else k), split(m.v(x))
        return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    layers = {each: nn.Linear(12, 12) for each in ("q", "k", "v", "out")}
    net = Fn(forward, **layers, gain=nn.Parameter(torch.rand(4) + 0.5))
    assert plan_of(net, torch.randn(2, 5, 12)).code.queries == ()
