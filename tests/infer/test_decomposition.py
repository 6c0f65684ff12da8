"""Operators without a rule are taken apart into such as have one, exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from counting import flops
from deadness import close_some, randomise
from differences import difference, in_float64, onnx_difference
from networks import TOKENS, Fn
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.infer.decomposition import take_apart
from l0prune.infer.nodes import operator_name

HIDDEN = 12
# Each gets what a layer writes, (…, tokens, hidden), and gives what a layer of as many reads.
COMPOSITES = {
    "tensordot": lambda m, h: torch.tensordot(h, m.w, dims=([2], [0])),
    "inner": lambda m, h: torch.inner(h, m.w.T),
    "multi_dot": lambda m, h: torch.stack([torch.linalg.multi_dot([r, m.w, m.v]) for r in h[:2]]),
    "kron": lambda m, h: torch.kron(h, torch.ones(1, 1, 1)) @ m.w,
    "diff": lambda m, h: torch.diff(h, dim=1) @ m.w,
    "hstack": lambda m, h: torch.hstack([h, h.tanh()]) @ m.w,
    "rot90": lambda m, h: torch.rot90(h, 1, (0, 1)) @ m.w,
    "trapezoid": lambda m, h: torch.trapezoid(h, dim=1) @ m.w,
    "nanmean": lambda m, h: h.nanmean(1) @ m.w,
    "vecdot": lambda m, h: torch.linalg.vecdot(h, h, dim=1) @ m.w,
    "cosine_similarity": lambda m, h: F.cosine_similarity(h, h.flip(1), dim=1, eps=0.1) @ m.w,
}


def network(of):
    model = Fn(
        lambda m, x: m.b(of(m, m.a(x).relu()).tanh()),
        a=nn.Linear(TOKENS[-1], HIDDEN), b=nn.Linear(10, 3),
        w=nn.Parameter(torch.randn(HIDDEN, 10)), v=nn.Parameter(torch.randn(10, 10)),
    )  # fmt: skip
    return randomise(model).eval(), torch.randn(TOKENS)


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.one_in(12)
def test_what_torch_makes_of_others_is_cut_exactly(name):
    torch.manual_seed(0)
    model, x = in_float64(*network(COMPOSITES[name]))
    found = l0prune.survey(model, (x,))
    assert not [pin for pin in found.pins if pin.operator]
    assert HIDDEN in [axis.size for axis in found.axes]
    small = l0prune.export(close_some(l0prune.gate(model, (x,), survey=found), 0))
    assert difference(model, small, x) <= 1e-10
    assert small.params < small.params_before


@pytest.mark.slow
def test_work_is_counted_and_where_it_comes_from_is_known(tmp_path):
    model, x = network(COMPOSITES["tensordot"])
    assert 2 * l0prune.survey(model, (x,)).macs * len(x) == flops(model, x)
    program = capture(model, (x,)).program
    before = {n.name for n in program.graph.nodes}
    take_apart(program)
    made = [n for n in program.graph.nodes if n.name not in before]
    assert made
    assert all(n.meta["stack_trace"] for n in made)
    torch.testing.assert_close(program.module()(x), model(x))
    small = l0prune.export(close_some(l0prune.gate(model, (x,)), 0))
    small.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= 1e-5


def test_results_of_a_call_with_several_are_renamed_everywhere():
    model = Fn(lambda m, x: torch.aminmax(m.a(x), dim=0), a=nn.Linear(4, 3))
    x = torch.randn(5, 4)
    program = capture(model.eval(), (x,)).program
    take_apart(program)
    assert "getitem" not in str(program.graph)
    for mine, theirs in zip(program.module()(x), model(x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "of",
    [lambda h: h.kthvalue(2, 0)[0], lambda h: torch.cdist(h, h), lambda h: torch.fft.rfft(h).abs()],
)
@pytest.mark.one_in(3)
def test_what_cannot_be_taken_apart_for_good_stays(of):
    model = Fn(lambda m, x: of(m.a(x)), a=nn.Linear(4, 3)).eval()
    program = capture(model, (torch.randn(5, 4),)).program
    before = str(program.graph)
    take_apart(program)
    assert str(program.graph) == before


def test_an_input_may_be_called_as_a_new_node_would_be():
    class Differing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, sub, sub_1):
            return self.b(torch.diff(self.a(sub), dim=0) + torch.diff(self.a(sub_1), dim=0))

    x = torch.randn(4, 6), torch.randn(4, 6)
    model = l0prune.gate(randomise(Differing()).double().eval(), tuple(t.double() for t in x))
    small = l0prune.export(close_some(model))
    assert small.params < small.params_before


@pytest.mark.parametrize(
    ("product", "left"),
    [
        (lambda m, x: F.linear(torch.eye(4), m.w), "t"),
        (lambda m, x: torch.eye(4) @ m.w.T, "numpy_T"),
        (lambda m, x: x @ torch.eye(3).to(x.dtype), None),
        (lambda m, x: F.linear(x, torch.eye(3)), None),
        (lambda m, x: F.linear(torch.eye(4), m.w, m.b), "linear"),
        (lambda m, x: torch.eye(4, 5) @ torch.ones(5, 3), "matmul"),
    ],
)
def test_a_product_with_an_identity_is_its_other_factor(product, left):
    run = lambda m, x: product(m, x).relu()  # noqa: E731
    model = Fn(run, w=nn.Parameter(torch.randn(3, 4)), b=nn.Parameter(torch.randn(3)))
    x = torch.randn(4, 3)
    program = capture(model.eval(), (x,)).program
    take_apart(program)
    (output,) = program.graph.find_nodes(op="output")
    ((result,),) = (node.args[:1] for node in output.args[0])
    assert (result.op == "placeholder") == (left is None)
    assert left is None or operator_name(result.target).removeprefix("aten.") == left
    assert torch.allclose(program.module()(x), model(x), atol=1e-6)
