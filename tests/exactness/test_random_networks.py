"""Random networks: whatever is closed is dead, what is counted is there, what is cut is exact."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from counting import flops
from deadness import relative_effect_of_dead_slots
from differences import difference, graph_difference
from example_counts import costliest, costly
from hypothesis import given
from hypothesis import strategies as st
from random_networks import ALL_KINDS, written
from torch import nn

import l0prune
from l0prune.errors import NothingToPrune
from l0prune.plan.cost import CostModel
from l0prune.plan.switches import switches_of


def check_dead(network: nn.Module, x: torch.Tensor) -> None:
    plan, error = relative_effect_of_dead_slots(network, (x,))
    assert error <= 1e-10
    network.runs_all = False  # what no output needs is not counted
    if network.has_plain_costs:
        assert 2 * CostModel(plan).dense("macs") * len(x) == flops(network, x)


@costly
@given(st.data(), st.integers(1, 10))
def test_closed_slots_of_random_networks_are_dead(data, steps):
    network, x = written(lambda n: data.draw(st.integers(0, n - 1)), steps)
    check_dead(network, x)


@costliest
@given(st.data(), st.integers(2, 8))
def test_random_networks_are_exported_exactly(data, steps):
    network, x = written(lambda n: data.draw(st.integers(0, n - 1)), steps)
    check_export(network, x)


def check_export(network: nn.Module, x: torch.Tensor, part: float = 0.5) -> None:
    """With this part of all slots closed, and half of the branches."""
    model = copy.deepcopy(network)
    try:
        l0prune.gate(model, (x,), branches=True)
    except NothingToPrune:
        return
    bank = l0prune.gates(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        bank.log_alpha.uniform_(-1.5, 2.5, generator=generator)
        drawn = torch.rand(bank.plan.size, generator=generator)
        bank.log_alpha[drawn < torch.where(switches_of(bank.plan), 0.5, part)] = -5.0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = l0prune.export(model.eval())
    # what half of a small network's gates leave open may be nothing
    assert difference(model, small, x, may_vanish=True) <= 1e-10
    assert graph_difference(model, small, x, may_vanish=True) <= 1e-10
    assert parameters_read(small.program) == small.params
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    l0prune.ungate(model)
    with torch.no_grad():  # torch's cond warns where weights have gradients
        assert all(torch.equal(a, b) for a, b in zip(model(x), network(x), strict=True))


def parameters_read(program: torch.export.ExportedProgram) -> int:
    names = program.graph_signature.inputs_to_parameters
    placeholders = program.graph.find_nodes(op="placeholder")
    read = {names[n.name] for n in placeholders if n.name in names and n.users}
    return sum(p.numel() for name, p in program.named_parameters() if name in read)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_networks(part):
    for number in range(100):
        source = random.Random(100 * part + number)
        network, x = written(source.randrange, source.randint(1, 14), ALL_KINDS)
        check_dead(network, x)
        check_export(network, x, part=(0.5, 0.2, 0.0)[number % 3])
