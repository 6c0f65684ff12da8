"""Where gates must act at what writes an axis: only if the operator keeps zeros as it is set."""

import pytest
import torch
import torch.nn.functional as F
from deadness import relative_effect_of_dead_slots
from networks import Fn
from torch import nn

KEEPS = {
    "relu6": F.relu6,
    "clamp from 0": lambda x: x.clamp(0, 6),
    "masked_fill with 0": lambda x: x.masked_fill(torch.eye(4, 1).bool(), 0.0),
    "masked_fill where it is large": lambda x: x.masked_fill(x > 0.2, 1.0),
    "hardtanh around 0": lambda x: F.hardtanh(x, -0.5, 0.5),
    "product": lambda x: x * 3 - x / 2,
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "power": lambda x: x**2,
    "in place": lambda x: (x * 1).mul_(3).relu_(),
    "an operator without a name here": lambda x: torch.hypot(x, x),
}
LOSES = {
    "sigmoid": torch.sigmoid,
    "clamp from above 0": lambda x: x.clamp(0.2, 6),
    "masked_fill with 1": lambda x: x.masked_fill(torch.zeros(4, 1, dtype=torch.bool), 1.0),
    "hardtanh above 0": lambda x: F.hardtanh(x, 0.2, 1.0),
    "threshold in place": lambda x: F.threshold(x * 1, 0.1, 7.0, inplace=True),
    "sum with a number": lambda x: x + 1,
    "where with a number": lambda x: torch.where(x > 99, x, 1.0),
    "power 0": lambda x: x**0,
    "filled in place": lambda x: (x * 1).masked_fill_(x > 99, 1.0),
}


def plan_and_error(function):
    """Half of a sum is ``a(x)`` through the function, with no weight that reads it."""
    module = Fn(lambda m, x: function(m.a(x)).sum(1, keepdim=True), a=nn.Linear(10, 8))
    return relative_effect_of_dead_slots(module, (torch.randn(4, 10),))


@pytest.mark.parametrize("name", KEEPS)
def test_gates_act_at_the_writer_where_zeros_survive(name):
    plan, error = plan_and_error(KEEPS[name])
    assert "a" in [axis.name.removeprefix("run.") for axis in plan.axes]
    assert error <= 1e-12


CROSSED = {
    # h is zero at closed slots, and what is made of it carries its axis: but along other dims,
    # or from the rows of a weight that no gate reaches.
    "a computed weight with rows and columns on one axis": lambda m, h: h + F.linear(h, m.w * 0.5),
    "the same, as a product of matrices": lambda m, h: h + h @ (m.w * 0.5),
    "all pairs": lambda m, h: h * (h[:, :, None] + h[:, None, :]).sum(1),
    "copies": lambda m, h: h * h.sum(1, keepdim=True).expand_as(h).sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", CROSSED)
def test_zeros_of_another_dim_do_not_count(name):
    module = Fn(
        lambda m, x: m.b(CROSSED[name](m, m.a(x)).sum(1, keepdim=True)),
        a=nn.Linear(10, 8),
        w=nn.Parameter(torch.randn(8, 8)),
        b=nn.Linear(1, 3),
    )
    plan, error = relative_effect_of_dead_slots(module, (torch.randn(4, 10),))
    assert [axis.size for axis in plan.axes] == [10]
    assert error <= 1e-12


@pytest.mark.parametrize("name", LOSES)
def test_and_nowhere_else(name):
    plan, _ = plan_and_error(LOSES[name])
    assert "a" not in [axis.name.removeprefix("run.") for axis in plan.axes]
    (pin,) = [pin for pin in plan.pins if pin.where == "a.weight dim 0"]
    assert "not zero there" in pin.reason
