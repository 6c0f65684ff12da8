"""Networks with control flow and compiled functions: their weights are lent, and what they read
stays whole, which is known when they are gated."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan

import l0prune
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.dtypes import Dtypes, lent, marked


class Recurrent(nn.Module):
    """A gated cell over the steps of a sequence, which computes in float32 in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(5, 12), nn.Linear(12, 6)
        self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        steps = self.gate(self.embed(x).relu()).transpose(0, 1)

        def step(state, given):
            new = torch.sigmoid(given).float() * torch.tanh(self.cell(state)).float()
            return new.to(given.dtype), new.to(given.dtype).clone()

        last, _ = scan(step, torch.zeros_like(steps[0]), steps)
        return self.head(last)


class Choosing(nn.Module):
    """One of two experts, whose weights are operands of the choice; the first one repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 2)
        self.left, self.right = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))

    def forward(self, x):
        x = self.first(x).relu()

        def repeated(x, left, right):
            def body(count, y):
                return count + 1, torch.tanh(y @ left) + y

            return while_loop(lambda count, y: count < 2, body, (torch.zeros(()).long(), x))[1]

        chosen = torch.cond(
            x.mean() > 0.3, repeated, lambda x, left, right: x @ right, (x, self.left, self.right)
        )
        return self.head(chosen)


@torch.compile(fullgraph=True, backend="eager")
def mixed(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias).sin()


class Compiled(nn.Module):
    """A helper that was compiled, and gets weights as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(mixed(x, self.first.weight, self.first.bias))


def steps_of(model, x):
    """The recurrent network step by step, in the dtype of ``x`` throughout."""
    steps = model.gate(model.embed(x).relu()).transpose(0, 1)
    state = torch.zeros_like(steps[0])
    for given in steps:
        state = torch.sigmoid(given) * torch.tanh(model.cell(state))
    return model.head(state)


@torch.no_grad()
def test_casts_in_a_loop_are_lifted_in_module_and_graph():
    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.randn(3, 4, 5)
    graph = torch.export.export(model, (x,)).module(check_guards=False)
    marked(graph, Dtypes.of(graph))
    found = [output_of(lent(m, torch.float64), ((x,), {}), torch.float64) for m in (model, graph)]
    expected = steps_of(model.double(), x.double())
    for each in found:
        assert each.dtype == torch.float64
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-14)


@torch.no_grad()
def test_compiled_functions_run_with_lent_weights():
    torch.manual_seed(0)
    model, x = Compiled().eval(), torch.randn(3, 4, 5)
    found = output_of(lent(model, torch.float64), ((x,), {}), torch.float64)
    model, x = model.double(), x.double()
    torch.testing.assert_close(found, model.head(model.first(x).sin()), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "operator"), [(Recurrent, "scan"), (Choosing, "cond"), (Compiled, "")]
)
@pytest.mark.one_in(3)
def test_it_is_cut_outside_and_whole_inside(kind, operator, tmp_path):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(3, 4, 5)
    l0prune.gate(model, (x,))
    bank = l0prune.gates(model)
    reasons = {pin.where: pin.reason for pin in bank.plan.pins}
    inside = {"scan": ["cell.weight dim 0"], "cond": ["left dim 0", "right dim 1"], "": []}[
        operator
    ]
    assert all(f"operator {operator} at" in reasons[where] for where in inside)
    with torch.no_grad():
        bank.log_alpha[::2] = -10.0
        expected = model(x)
        small = l0prune.export(model)
        found = small.module(x)
    assert small.params < small.params_before
    assert small.certificate.worst(("graph", "class"), "float64") <= 1e-12
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
