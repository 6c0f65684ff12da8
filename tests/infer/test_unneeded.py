"""What no output, buffer or input needs is no part of a plan, whatever operator computes it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import Fn
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.infer.build import analyse

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def attention(m, h):
    F.scaled_dot_product_attention(*[m.side(h)[:, None]] * 3)


def write(m, h):
    y = m.side(h).clone()
    y += h
    y[:, 1:].mul_(2)


def noise(m, h):
    F.dropout(m.side(h), 0.5, training=True).add_(torch.randn_like(h))


def write_into_a_dropout(m, h):
    F.dropout(m.side(h) * 2, 0.5, training=False).add_(1)


def cast(m, h):
    F.scaled_dot_product_attention(*[m.side(h).double()[:, None]] * 3)


def network(dead):
    def forward(m, x):
        h = m.first(x).relu()
        if dead is not None:
            dead(m, h)
        return m.last(h)

    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 6), "side": nn.Linear(6, 6), "last": nn.Linear(6, 2)}
    return Fn(forward, **layers).eval()


def called(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dead", [attention, write, noise, write_into_a_dropout, cast])
@pytest.mark.one_in(5)
def test_dead_calls_leave_plan_and_counts(dead):
    plain, model = network(None), network(dead)
    wanted, found = (analyse(capture(each, (X,))) for each in (plain, model))
    assert called(found.captured.program) == called(wanted.captured.program)
    assert found.captured.unused == ("side.weight", "side.bias")
    assert found.plan.names == wanted.plan.names
    l0prune.gate(model, X)
    bank = l0prune.gates(model)
    with torch.no_grad():
        bank.log_alpha[::2] = -9.0
    small = l0prune.export(model)
    assert called(small.program).count("aten.linear.default") == 2
    kinds = {"aten.linear.default", "aten.relu.default", "aten.index_select.default"}
    assert set(called(small.program)) <= kinds
    torch.testing.assert_close(small.module(X), model(X))
    used = sum(p.numel() for n, p in small.program.named_parameters() if "side" not in n)
    assert used == small.params


def test_a_draw_stays_that_a_later_one_follows():
    """Without it the later one would give other numbers."""

    def forward(m, x):
        torch.rand_like(x)
        return m.a(x) * torch.rand_like(x[:, :1])

    program = analyse(capture(Fn(forward, a=nn.Linear(4, 3)).eval(), (X,))).captured.program
    assert called(program).count("aten.rand_like.default") == 2


def test_what_only_a_part_reads_that_is_written_over_later_stays():
    def forward(m, x):
        h = m.a(x)
        view = h[:, :2]
        view.add_(m.b(x))  # read by way of h
        return h

    model = Fn(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 2)).eval()
    captured = analyse(capture(model, (X,))).captured
    assert not captured.unused
    torch.testing.assert_close(captured.program.module()(X), copy.deepcopy(model)(X))


class Counting(nn.Module):
    """Writes into a buffer what no output needs."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        y = self.a(x)
        self.seen.add_(y.square().mean(0))
        return y * 2


def test_what_a_buffer_needs_stays():
    graph = analyse(capture(Counting().eval(), (X,))).captured.program
    assert "aten.square.default" in called(graph)
    assert "aten.add_.Tensor" in called(graph)


def test_what_is_asserted_of_a_number_of_positions_is_gone_with_them():
    """torch asserts 0 <= u0 <= 3 of the positions at which a mask is true."""

    def forward(m, x):
        m.b(x)[x[:, 0] > 0].exp()
        return m.a(x)

    captured = analyse(
        capture(Fn(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 2)).eval(), (X,))
    ).captured
    assert captured.unused == ("b.weight", "b.bias")
    assert called(captured.program) == ["aten.linear.default"]


def test_what_is_asserted_of_sizes_that_an_output_has_stays():
    def forward(m, x):
        return m.a(x)[x[:, 0] > 0]

    program = analyse(capture(Fn(forward, a=nn.Linear(4, 3)).eval(), (X,))).captured.program
    assert "aten._assert_scalar.default" in called(program)


def test_what_a_model_asserts_of_values_stays():
    def forward(m, x):
        torch._check(m.b(x).sum().item() < 1e9)
        return m.a(x)

    model = Fn(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 2)).eval()
    captured = analyse(capture(model, (X,))).captured
    assert not captured.unused
    assert "aten._assert_scalar.default" in called(captured.program)


class Watching(Counting):
    """Computes by a layer of its own what it writes into a buffer, and no output needs."""

    def __init__(self):
        super().__init__()
        self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        self.seen.add_(self.c(self.b(x)).square().mean(0))
        return self.a(x) * 2


def test_what_alone_a_buffer_needs_is_counted():
    model = l0prune.gate(Watching().eval(), (X,))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[1] = -9  # of b
    small = l0prune.export(model)
    assert [tuple(p.shape) for p in small.module.b.parameters()] == [(4, 4), (4,)]
    assert small.params == sum(p.numel() for p in small.module.parameters())
    for _ in range(2):
        torch.testing.assert_close(small.module(X), model(X))
        torch.testing.assert_close(small.module.seen, model.seen)
