"""A graph with a free batch has the plan of the example's graph, by which a model is gated."""

import pytest
import torch
import torch.nn.functional as F
from networks import Fn
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.exporting import capture_parts
from l0prune.infer.build import analyse


def through(copies):
    """Two products with weights of which each example gets a copy."""

    def forward(m, x):
        hidden = torch.relu(m.a(x) @ copies(m.up, x.shape[0]))
        return m.b(hidden / hidden.shape[-1] @ copies(m.down, x.shape[0]))

    return forward


def slots_read_by_queries(m, x):
    memory = (m.memory * m.scale).expand(x.shape[0], -1, -1)
    return m.b(F.scaled_dot_product_attention(m.a(x), memory, memory))


def own_kernel_of_each(m, x):
    rows = m.a(x).transpose(1, 2).reshape(1, -1, x.shape[1])
    kernels = m.up.t()[None].repeat(x.shape[0], 1, 1).reshape(-1, 8, 1)
    mixed = F.conv1d(rows, kernels, groups=x.shape[0]).view(x.shape[0], 12, -1)
    return m.b(mixed.transpose(1, 2).relu() @ m.down)


FORWARDS = {
    "expanded": through(lambda w, n: w.expand(n, -1, -1)),
    "repeated": through(lambda w, n: w[None].repeat(n, 1, 1)),
    "interleaved": through(lambda w, n: w[None].repeat_interleave(n, 0)),
    "broadcast": through(lambda w, n: torch.broadcast_to(w, (n, *w.shape))),
    "times_ones": through(lambda w, n: w * torch.ones(n, 1, 1)),
    "picked": through(lambda w, n: w[None][torch.zeros(n, dtype=torch.long)]),
    "divided": through(lambda w, n: w / n),
    "added": lambda m, x: m.b(m.a(x).relu() @ m.up @ torch.baddbmm(
        m.scale.expand(x.shape[0], 12, -1), m.up.t().expand(x.shape[0], -1, -1),
        torch.eye(8).expand(x.shape[0], -1, -1))),
    "memory": slots_read_by_queries,
    "kernels": own_kernel_of_each,
}  # fmt: skip


def network(forward):
    torch.manual_seed(0)
    weights = {"up": (8, 12), "down": (12, 8), "memory": (1, 5, 8), "scale": (1, 1, 8)}
    drawn = {name: nn.Parameter(torch.randn(shape) / 3) for name, shape in weights.items()}
    return Fn(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3), **drawn).eval()


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.one_in(3)
def test_the_plans_are_equal(name):
    model, x = network(FORWARDS[name]), torch.randn(2, 4, 6)
    fixed, free = capture(model, (x,)), capture(model, (x,), dynamic_batch=True)
    assert (fixed.dynamic, free.dynamic) == (False, True)
    plans = [analyse(each).plan for each in (fixed, free)]
    assert plans[0].sites == plans[1].sites
    assert len({site.tensor for site in plans[0].sites}) > 1
    assert plans[0].tensors == plans[1].tensors
    assert [pin.where for pin in plans[0].pins] == [pin.where for pin in plans[1].pins]


@pytest.mark.parametrize("name", ["expanded", "interleaved"])
def test_a_graph_with_such_weights_takes_every_batch(name):
    model, x = network(FORWARDS[name]), torch.randn(2, 4, 6)
    bank = l0prune.gates(l0prune.gate(model, (x,)))
    with torch.no_grad():
        bank.log_alpha[::2] = -9
    small = l0prune.export(model)
    assert small.params < small.params_before
    assert not small.rebuilt  # its code divides by a width
    assert "batches of" not in small.note
    other = torch.randn(5, 4, 6)
    with torch.no_grad():
        torch.testing.assert_close(small.module(other), model(other), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_note_says_that_the_axes_differ(monkeypatch):
    """Where the plans differ for all that, the graph is the example's, and torch is not blamed."""
    true, asked = capture_parts._same_gates, []
    monkeypatch.setattr(
        capture_parts,
        "_same_gates",
        lambda *plans: bool(asked.append(0) or asked[1:]) and true(*plans),
    )
    model, x = network(FORWARDS["expanded"]), torch.randn(2, 4, 6)
    bank = l0prune.gates(l0prune.gate(model, (x,)))
    with torch.no_grad():
        bank.log_alpha[::2] = -9
    note = l0prune.export(model).note
    assert "for batches of 2 only: in the graph with a free batch size l0prune finds" in note
