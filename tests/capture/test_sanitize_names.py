"""Modules whose names are no Python names, or hold what globs are made of."""

import copy
from contextlib import nullcontext

import pytest
import torch
from deadness import close_some, randomise
from differences import as_graph, learned_on
from torch import nn

import l0prune


class Named(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.of = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.of.values():
            x = torch.relu(layer(x))
        return self.out(x)


WORDS, GLOBS = ("in", "in_", "None"), ("a[1]", "a1", "a b", "1*x")
SLOW = pytest.mark.slow


# By default what the code of a graph cannot say, and what is meant by the name that is left out.
@pytest.mark.parametrize(
    ("names", "own_class"),
    [
        (WORDS, False),
        (GLOBS, True),
        pytest.param(GLOBS, False, marks=SLOW),
        pytest.param(WORDS, True, marks=SLOW),
    ],
)
@pytest.mark.slow
def test_any_name_that_torch_takes_is_taken(names, own_class, tmp_path):
    model, x = randomise(Named(*names)).double().eval(), torch.randn(3, 6).double()
    l0prune.gate(model, x)
    assert [axis.name for axis in l0prune.gates(model).axes][:2] == [f"of.{n}" for n in names[:2]]
    with nullcontext() if own_class else as_graph():
        small = l0prune.export(close_some(model))
    assert small.params < small.params_before
    assert small.rebuilt == own_class
    torch.testing.assert_close(copy.deepcopy(small.module)(x), model(x), rtol=1e-10, atol=1e-12)
    learned_on(small).save_onnx(tmp_path / "m.onnx")


def test_a_name_with_brackets_means_itself():
    model, x = Named("a[1]", "a1"), torch.randn(3, 6)
    l0prune.gate(model, x, include="of.a[1]", open_probability={"of.a[1]": 0.5})
    assert l0prune.gates(model).plan.names == ("of.a[1]",)
    penalty = l0prune.penalty(model, {"of.a[1]": 1.0})
    assert penalty.requires_grad
