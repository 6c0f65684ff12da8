"""Kernels that the input mixes: an axis of kind ``kernel``, cut exactly, whatever mixes them."""

import random

import pytest
import torch
from dynamic_layers import Dynamic
from torch import nn

import l0prune


def network(seed):
    """Two of them, of random sizes and ways."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    widths = [draw.randint(2, 6) for _ in range(3)]

    def dynamic(inputs, outputs):
        ways = draw.choice(("product", "einsum", "loop"))
        of = draw.randint(2, 4), draw.random() < 0.6, draw.random() < 0.5, ways
        return Dynamic(inputs, outputs, *of)

    return nn.Sequential(
        nn.Conv2d(3, widths[0], 3),
        nn.Sigmoid(),
        dynamic(*widths[:2]),
        nn.BatchNorm2d(widths[1]),
        nn.Tanh(),
        dynamic(*widths[1:]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[2], 2),
    ).eval()


def closed_in_part(model, x, seed):
    gates = l0prune.gates(l0prune.gate(model, (x,)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        gates.log_alpha.copy_(3 * torch.randn(gates.plan.size, generator=generator) + 1)
        for axis in gates.plan.axes:
            gates.log_alpha[axis.start] = 2.0
            if axis.kind == "kernel":
                gates.log_alpha[axis.start + axis.size - 1] = -9.0
    return gates


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(4)
def test_channels_and_kernels_are_cut_exactly(seed):
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    model = network(seed).double()
    kernels = [m.weight.shape[0] for m in model if isinstance(m, Dynamic)]
    gates = closed_in_part(model, x, seed)
    axes = {axis.name: axis for axis in gates.plan.axes if axis.kind == "kernel"}
    assert [axes[name].size for name in ("2.kernels", "5.kernels")] == kernels
    expected = model(x)
    small = l0prune.export(model)
    assert torch.allclose(small.module(x), expected, rtol=1e-10, atol=1e-12)
    left = {name: int(gates.open()[axis.slice].sum()) for name, axis in axes.items()}
    state = small.module.state_dict()
    for name, kept in left.items():
        assert state[name.replace("kernels", "weight")].shape[0] == kept < axes[name].size


def test_shares_that_a_softmax_normalised_all_stay():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Dynamic(4, 5, 4, True, True, "product"), nn.Flatten())
    model = nn.Sequential(*model, nn.Linear(180, 2)).eval()
    x = torch.randn(2, 3, 6, 6)
    gates = l0prune.gates(l0prune.gate(model, (x,), include="1.kernels"))
    with torch.no_grad():
        gates.log_alpha[1:3] = -9.0
    small = l0prune.export(model)
    state = small.module.state_dict()
    assert state["1.weight"].shape == (2, 5, 4, 3, 3)
    assert state["1.bias"].shape == (2, 5)
    assert state["1.attention.weight"].shape == (4, 4)
    again = torch.randn(5, 3, 6, 6)  # any batch
    assert torch.allclose(small.module(again), model(again), atol=1e-5)


@pytest.mark.slow
def test_a_matrix_that_the_input_multiplies_has_no_kernels():
    layers = {"first": nn.Linear(6, 4), "table": nn.Parameter(torch.randn(4, 3))}

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.table = layers["first"], layers["table"]

        def forward(self, x):
            return self.first(x).softmax(1) @ self.table

    plan = l0prune.survey(Lookup().eval(), (torch.randn(2, 6),)).plan
    assert all(axis.kind != "kernel" for axis in plan.axes)
