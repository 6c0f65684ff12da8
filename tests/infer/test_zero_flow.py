"""Where gates must act at what writes an axis: only if the operator keeps zeros as it is set."""

import pytest
import torch
import torch.nn.functional as F
from deadness import close_some, randomise, relative_effect_of_dead_slots
from networks import Fn
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.infer.build import analyse


def then_overwritten(x):
    y = x * 1
    y[:2].add_(1)
    return y


KEEPS = {
    "relu6": F.relu6,
    "clamp from 0": lambda x: x.clamp(0, 6),
    "masked_fill with 0": lambda x: x.masked_fill(torch.eye(4, 1).bool(), 0.0),
    "masked_fill where it is large": lambda x: x.masked_fill(x > 0.2, 1.0),
    "hardtanh around 0": lambda x: F.hardtanh(x, -0.5, 0.5),
    "filled in place where it is large": lambda x: (x * 1).masked_fill_(x > 99, 1.0),
    "added to in place": lambda x: (x * 1).add_(x),
    "rolled": lambda x: x.roll(1, 0),
    "padded with zeros": lambda x: F.pad(x, (0, 0, 1, 1)),
    "product": lambda x: x * 3 - x / 2,
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "power": lambda x: x**2,
    "in place": lambda x: (x * 1).mul_(3).relu_(),
    "an operator without a name here": torch.erf,
    "divided by what is not zero": lambda x: x / (x.var(0, keepdim=True) + 1e-3).sqrt(),
    "divided by a clamped norm": lambda x: F.normalize(x, dim=0),
    "divided by the largest and a little": lambda x: x / (x.abs().amax(0, keepdim=True) + 1e-3),
    "indexed elsewhere": lambda x: x[torch.tensor([1, 0])],
}
LOSES = {
    "sigmoid": torch.sigmoid,
    "clamp from above 0": lambda x: x.clamp(0.2, 6),
    "masked_fill with 1": lambda x: x.masked_fill(torch.zeros(4, 1, dtype=torch.bool), 1.0),
    "hardtanh above 0": lambda x: F.hardtanh(x, 0.2, 1.0),
    "threshold in place": lambda x: F.threshold(x * 1, 0.1, 7.0, inplace=True),
    "overwritten through a view": then_overwritten,
    "padded with ones": lambda x: F.pad(x, (0, 0, 1, 1), value=1.0),
    "sum with a number": lambda x: x + 1,
    "where with a number": lambda x: torch.where(x > 99, x, 1.0),
    "power 0": lambda x: x**0,
    "filled in place": lambda x: (x * 1).masked_fill_(x < 99, 1.0),
    "zero by zero": lambda x: x / x.amax(0, keepdim=True),
    "zero by zero, squared": lambda x: x * x / x.var(0, keepdim=True),
    "zero by infinity": lambda x: x * x.square().reciprocal(),
    "zero by infinity times anything": lambda x: x * (x.square().reciprocal() * x.cos().cumsum(0)),
    "a root, which has no gradient at zero": lambda x: x.square().sqrt(),
    "a standard deviation, which has none either": lambda x: x.std(0, keepdim=True),
    "what comes of one": lambda x: x * (x.std(0, keepdim=True) + 1).flip(0),
}


ALIKE = (
    "sigmoid",
    "clamp from above 0",
    "masked_fill with 1",
    "hardtanh above 0",
    "sum with a number",
    "where with a number",
    "power 0",
)


def plan_and_error(function):
    """``a(x)`` through the function, and a norm of it, which no weight reads."""
    run = lambda m, x: torch.linalg.vector_norm(function(m.a(x)), dim=1, keepdim=True)  # noqa: E731
    return relative_effect_of_dead_slots(Fn(run, a=nn.Linear(10, 8)), (torch.randn(4, 10),))


@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.one_in(3)
def test_gates_act_at_the_writer_where_zeros_survive(name):
    plan, error = plan_and_error(KEEPS[name])
    assert "a" in [axis.name.removeprefix("run.") for axis in plan.axes]
    assert error <= 1e-12


CROSSED = {
    # h is zero at closed slots, and what is made of it carries its axis: but along other dims,
    # or from the rows of a weight, which then have to be gated, too.
    "a computed weight with rows and columns on one axis": lambda m, h: h + F.linear(h, m.w * 0.5),
    "the same, as a product of matrices": lambda m, h: h + h @ (m.w * 0.5),
    "all pairs": lambda m, h: h * (h[:, :, None] + h[:, None, :]).sum(1),
    "copies": lambda m, h: h * h.sum(1, keepdim=True).expand_as(h).sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.one_in(2)
def test_zeros_of_another_dim_do_not_count(name):
    module = Fn(
        lambda m, x: m.b(CROSSED[name](m, m.a(x)).sum(1, keepdim=True)),
        a=nn.Linear(10, 8),
        w=nn.Parameter(torch.randn(8, 8)),
        b=nn.Linear(1, 3),
    )
    plan, error = relative_effect_of_dead_slots(module, (torch.randn(4, 10),))
    is_by_weight = "matri" in name or "weight" in name
    assert [axis.size for axis in plan.axes] == ([8, 10] if is_by_weight else [10])
    assert error <= 1e-12


def test_operators_are_tried_on_the_cpu():
    with torch.device("meta"):
        module = Fn(lambda m, x: torch.relu(m.a(x) * 2).sum(1), a=nn.Linear(10, 8))
        plan = analyse(capture(module, (torch.randn(4, 10),))).plan
    assert plan.axes[0].name == "a"


@pytest.mark.parametrize("name", LOSES)
@pytest.mark.one_in(3)
def test_and_nowhere_else(name):
    plan, _ = plan_and_error(LOSES[name])
    assert "a" not in [axis.name.removeprefix("run.") for axis in plan.axes]
    (pin,) = [pin for pin in plan.pins if pin.where == "a.weight dim 0"]
    assert "not zero there" in pin.reason


@pytest.mark.parametrize("name", LOSES)
@pytest.mark.one_in(3)
def test_a_sum_makes_up_for_what_closed_slots_leave_alike(name):
    """It can be told what they added where all of them became the same number, and only there."""
    function = LOSES[name]
    model = Fn(lambda m, x: function(m.a(x)).sum(1, keepdim=True), a=nn.Linear(10, 8)).double()
    x = torch.randn(4, 10, dtype=torch.float64)
    plan = l0prune.gates(l0prune.gate(model, (x,))).plan
    assert (plan.axes[0].name == "a") == (name in ALIKE)
    if name in ALIKE:
        close_some(model)
        with torch.no_grad():
            assert torch.allclose(l0prune.export(model).module(x), model(x), rtol=1e-12)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False)])
@pytest.mark.one_in(2)
def test_a_norm_is_read_without_a_weight_and_gated_where_it_shifts(norm):
    """Post-norm: the stream is what a LayerNorm wrote, so its weight and bias carry gates."""
    layers = {"a": nn.Linear(10, 8), "first": norm, "b": nn.Linear(8, 8)}
    layers |= {"last": nn.LayerNorm(8), "c": nn.Linear(8, 3)}
    module = Fn(lambda m, x: m.c(m.last((y := m.first(m.a(x))) + m.b(y))), **layers)
    plan, error = relative_effect_of_dead_slots(randomise(module), (torch.randn(4, 10),))
    assert plan.axes[0].size == 8
    gated = {site.tensor for site in plan.sites if site.role == "write"}
    assert {"a.weight", "a.bias", "b.weight", "b.bias", "first.weight"} <= gated
    assert not any(name.startswith("last") for name in gated)
    assert error <= 1e-12


def test_parameters_that_put_values_into_a_stream_are_gated_too():
    def forward(m, x):
        x = torch.cat([m.token.expand(x.shape[0], -1, -1), m.a(x)], 1) + m.positions
        return m.b(m.norm(x))

    module = Fn(
        forward, a=nn.Linear(10, 8), norm=nn.LayerNorm(8), b=nn.Linear(8, 3),
        token=nn.Parameter(torch.randn(1, 1, 8)), positions=nn.Parameter(torch.randn(1, 6, 8)),
    )  # fmt: skip
    plan, error = relative_effect_of_dead_slots(module, (torch.randn(4, 5, 10),))
    assert plan.axes[0].name == "a"
    gated = {site.tensor for site in plan.sites if site.role == "write"}
    assert gated == {"a.weight", "a.bias", "token", "positions"}
    assert error <= 1e-12


def rows(eps):
    """A layer that divides by the sums of the rows of its Gram matrix."""

    def forward(m, x):
        h = F.linear(x, m.w).relu()
        return m.last(h / ((m.w @ m.w.t()).abs().sum(1) + eps))

    torch.manual_seed(0)
    return Fn(forward, w=nn.Parameter(torch.randn(8, 5)), last=nn.Linear(8, 3)).double().eval()


def test_a_sum_over_one_dim_keeps_the_zeros_of_the_other():
    x = torch.randn(4, 5).double()
    assert "w" not in [axis.name for axis in l0prune.survey(rows(0), x).plan.axes]
    model = l0prune.gate(rows(1e-2), x)
    assert "w" in l0prune.gates(model).plan.names
    l0prune.gates(model).log_alpha.data[::2] = -9.0
    small = l0prune.export(model)
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(x), model(x), rtol=1e-10, atol=1e-12)
