"""Programs that a module keeps as a list of steps: branches close exactly, with slots beside."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from deadness import randomise
from differences import difference, graph_difference
from torch import nn

import l0prune
from l0prune.plan.cost import cost_of
from l0prune.plan.switches import switches_of

SIDE = 3


def token_mlp(x, first, second):
    return second(F.gelu(first(x.flatten(2)))).view(x.shape)


def squeeze_excite(x, first, second):
    return x * second(first(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]


def attention(x, query, key, value, out):
    tokens = x.flatten(2).transpose(1, 2)
    found = F.scaled_dot_product_attention(query(tokens), key(tokens), value(tokens))
    return out(found).transpose(1, 2).reshape(x.shape)


def convolution(x, layer):
    return layer(x)


def layers_of(kind, width, wider):
    """The layers of one step, and the width that it gives."""
    if kind is token_mlp:
        return [nn.Linear(SIDE**2, 5), nn.Linear(5, SIDE**2)], width
    if kind is squeeze_excite:
        return [nn.Linear(width, 3), nn.Linear(3, width)], width
    if kind is attention:
        return [*(nn.Linear(width, 2) for _ in range(3)), nn.Linear(2, width)], width
    if wider:
        return [nn.Conv2d(width, wider, 3, padding=1)], wider
    return [nn.Conv2d(width, width, 3, padding=1, groups=width)], width


class Program(nn.Module):
    """Steps that each read one value and give another; all values are joined for the last layer."""

    def __init__(self, source: random.Random, steps: int) -> None:
        super().__init__()
        self.joins = source.choice(["cat", "sum"])
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 1)])
        self.steps: list[tuple] = []
        widths = [4]
        for _ in range(steps):
            kind = source.choice([token_mlp, squeeze_excite, attention, convolution])
            of = source.choice([len(widths) - 1, source.randrange(len(widths))])
            wider = source.choice([0, 3, 6]) if self.joins == "cat" else 0
            layers, width = layers_of(kind, widths[of], wider)
            adds = width == widths[of] and kind is not squeeze_excite and source.random() < 0.6
            numbers = range(len(self.layers), len(self.layers) + len(layers))
            self.layers.extend(layers)
            self.steps.append((kind, of, tuple(numbers), adds))
            widths.append(width)
        self.head = nn.Linear(sum(widths) if self.joins == "cat" else widths[0], 3)

    def forward(self, x):
        values = [self.layers[0](x)]
        for kind, of, numbers, adds in self.steps:
            y = kind(values[of], *(self.layers[number] for number in numbers))
            values.append(values[of] + y if adds else y)
        joined = torch.cat(values, 1) if self.joins == "cat" else sum(values)
        return self.head(joined.relu().mean((2, 3)))

    def __repr__(self):
        steps = [(kind.__name__, of, adds) for kind, of, _, adds in self.steps]
        return f"{self.joins} of {steps}"


def check(seed, steps, most=None):
    """Close each branch alone, or the ``most`` last ones, then all; each time with other slots."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    program = randomise(Program(source, steps)).double().eval()
    x = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    gated = l0prune.gate(copy.deepcopy(program), x)
    bank = l0prune.gates(gated)
    places = switches_of(bank.plan).nonzero().flatten().tolist()
    alone = [[place] for place in places]
    for gone in [*(alone if most is None else alone[-most:]), places]:
        open_ = torch.tensor([source.random() < 0.7 for _ in range(bank.plan.size)])
        open_[places] = True
        open_[gone] = False
        bank.set_open(open_)
        small = l0prune.export(gated)
        names = {axis.name for axis in bank.plan.axes if axis.start in gone}
        assert names <= {*small.gone}, program
        assert difference(gated, small, x, may_vanish=True) <= 1e-10, (program, names)
        assert graph_difference(gated, small, x, may_vanish=True) <= 1e-10, (program, names)
        held = sum(p.numel() for p in small.program.parameters())
        planned = cost_of(small.plan).actual(small.kept, "params")
        assert (held, small.params) == (planned, planned), (program, names)
    return len(places)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.slow
def test_a_branch_of_a_program_closes_exactly(seed):
    assert check(seed, 3, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_each_branch_of_programs_closes_exactly(seed):
    check(100 + seed, 3 + seed % 5)
