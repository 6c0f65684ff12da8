"""A gated network of two convolutions whose bits are learned."""

import copy
import functools

import torch
from torch import nn

import l0prune
from l0prune.features.int8.bits import with_bits
from l0prune.features.int8.learned_bits import LearnedBits
from l0prune.features.int8.ranges import QuantizedLayer, Scheme

MENU = (2, 4, 8, 16)
INFINITE = float("inf")
SCHEME = Scheme(
    (QuantizedLayer("0", "0.weight", 0, True, 1), QuantizedLayer("3", "3.weight", 1, False, 2)),
    ((-INFINITE, INFINITE), (0.0, INFINITE), (-INFINITE, INFINITE)),
    {"1": 1, "3": 2},
)
X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(1)
    layers = nn.Conv1d(2, 6, 1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 1)
    return nn.Sequential(*layers).eval()


@functools.cache
def gated():
    """One of which all are copies: to capture it takes long."""
    model = l0prune.gate(network(), X[:2])
    l0prune.gates(model).set_open("0", [0, 2, 3, 5])
    return model


def quantized(menu):
    """A network with four slots open, all bits of a menu, and its bank."""
    model = copy.deepcopy(gated())
    gates = l0prune.gates(model)
    plan = with_bits(gates.plan, SCHEME, menu)
    more = gates.log_alpha.new_full((plan.size - gates.plan.size,), 4.0)
    gates.change_plan(plan, torch.cat([gates.log_alpha.detach(), more]))
    made = LearnedBits(gates, SCHEME, menu)
    made.load(torch.tensor([[-1.5, 2.0], [0.0, 3.0], [-2.0, 2.0]]), (1, 1, 1))
    made.is_on = True
    made.attach(model)
    return model, gates
