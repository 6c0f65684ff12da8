"""Weights that the forward standardises: cut after the statistics of the whole have been taken."""

import pytest
import torch
import torch.nn.functional as F
from deadness import close_some, randomise
from differences import difference, in_float64
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from zoo import Standardised

import l0prune


def cut(model, x):
    torch.manual_seed(0)
    model, x = in_float64(randomise(model).eval(), x)
    small = l0prune.export(close_some(l0prune.gate(model, x)))
    assert difference(model, small, x) <= 1e-12
    assert small.params == sum(p.numel() for p in small.module.parameters()) < small.params_before
    return small


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def test_where_no_column_goes_the_class_stays():
    model = nn.Sequential(Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    dense = cut(model, X)
    assert dense.rebuilt


def test_a_weight_that_is_also_used_as_it_is_stays_whole():
    class Twice(Standardised):
        def forward(self, x):
            return super().forward(x) + F.conv2d(x, self.weight)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), Twice(8, 4, 1))
    reasons = [pin.reason for pin in l0prune.survey(model, X).pins]
    assert any("takes statistics over it" in reason for reason in reasons)
    assert not l0prune.survey(model, X).axes


def test_statistics_of_activations_pin():
    class Batch(nn.Module):
        def forward(self, x):
            return F.batch_norm(x.reshape(1, 2, -1), None, None, training=True).reshape_as(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), Batch(), nn.Conv2d(8, 4, 1))
    reasons = [pin.reason for pin in l0prune.survey(model, X).pins]
    assert any("takes statistics over it" in reason for reason in reasons)


@pytest.mark.slow
def test_columns_are_cut_only_where_what_they_read_is_zero():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Softplus(), Standardised(8, 4, 1))
    reasons = [pin.reason for pin in l0prune.survey(model, X).pins]
    assert any("not zero there" in reason for reason in reasons)
    assert not l0prune.survey(model, X).axes


def test_a_layer_of_which_nothing_is_left_is_no_division_by_zero():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), weight_norm(nn.Conv2d(8, 4, 1)))
    l0prune.gate(randomise(model).eval(), X)
    with torch.no_grad():
        l0prune.gates(model).log_alpha.fill_(-5)
    small = l0prune.export(model)
    torch.testing.assert_close(small.module(X), model(X))


@pytest.mark.slow
def test_a_branch_that_ends_in_a_weight_norm_goes_by_its_norms():
    """Weights of zero have the norm zero, and 0/0 is no number."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)
            self.outer = weight_norm(nn.Conv2d(6, 6, 3, padding=1, bias=False))

        def forward(self, x):
            x = self.stem(x)
            return self.head(x + self.outer(x).relu())

    model = randomise(Block()).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    (branch,) = l0prune.survey(model, x).plan.branches
    assert len(branch.tensors) == 1
    assert branch.tensors[0].endswith("original0")  # the norms
    wanted = model.head(model.stem(x))
    l0prune.gate(model, x)
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.log_alpha[
            [axis.kind == "branch" for axis in gates.axes for _ in range(axis.size)]
        ] = -9
    torch.testing.assert_close(model(x), wanted)
    small = l0prune.export(model)
    assert small.gone == (branch.name,)
    torch.testing.assert_close(small.module(x), wanted)
