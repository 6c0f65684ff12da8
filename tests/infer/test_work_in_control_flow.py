"""Work inside of conditions and loops is counted; what they read stays whole, with a reason."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan

import l0prune

WIDTH, STEPS, EXAMPLES = 12, 5, 2


class Network(nn.Module):
    """A layer, one of three kinds of control flow around layers, and a head."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(getattr(self, self.kind)(self.first(x)))

    def cond(self, x):
        return torch.cond(x.sum() > 0, lambda t: self.back(self.wide(t)), self.cell.forward, (x,))

    def scan(self, x):
        def step(state, given):
            new = torch.tanh(self.cell(state) + given)
            return new, new.clone()

        return scan(step, torch.zeros_like(x[:, 0]), x.transpose(0, 1))[1].transpose(0, 1)

    def while_loop(self, x):
        def body(count, y):
            return count + 1, torch.tanh(self.cell(y))

        return while_loop(lambda count, y: count < 3, body, (torch.zeros(()).long(), x))[1]


INSIDE = {
    "cond": STEPS * 4 * WIDTH**2,  # the costlier branch
    "scan": STEPS * WIDTH**2,
    "while_loop": STEPS * WIDTH**2,  # one turn: values decide how many there are
}


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.one_in(3)
def test_work_inside_of_control_flow_is_counted(kind):
    found = l0prune.survey(Network(kind).eval(), (torch.randn(EXAMPLES, STEPS, 8),))
    assert found.macs == STEPS * (8 * WIDTH + 3 * WIDTH) + INSIDE[kind]


def test_what_control_flow_reads_stays_whole_with_a_reason():
    model = Network("cond").eval()
    l0prune.gate(model, (torch.randn(EXAMPLES, STEPS, 8),))
    reasons = {pin.where: pin.reason for pin in l0prune.gates(model).plan.pins}
    assert "cond" in reasons["wide.weight dim 0"]
    assert "control flow" in reasons["wide.weight dim 0"]
