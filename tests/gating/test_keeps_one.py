"""Axes of which one gate is always open: with all closed the network would divide zero by zero."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from differences import difference
from made_weights import MADE_WEIGHTS
from networks import Fn
from torch import nn

import l0prune

NORMED = (
    "spectral_block",
    "spectral_block_with_hooks",
    "one_norm_of_a_weight",
    "one_norm_of_a_weight_with_hooks",
)


def gated(name):
    module, shape, _ = MADE_WEIGHTS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    return l0prune.gate(copy.deepcopy(module).double().eval(), (x,)), x


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.one_in(4)
@torch.no_grad()
def test_any_axes_may_be_closed(name):
    model, x = gated(name)
    bank = l0prune.gates(model)
    kept = [axis for axis in bank.plan.axes if axis.keeps_one]
    assert len(kept) == 2
    for closed in ([kept[0]], [kept[1]], bank.plan.axes):
        bank.log_alpha.fill_(20.0)
        for axis in closed:
            bank.log_alpha[axis.slice] = -20.0
            bank.log_alpha[axis.start + 2] = -19.0
        for axis in kept:
            z = bank.z()[axis.slice].tolist()
            assert z == [float(slot == 2 or axis not in closed) for slot in range(axis.size)]
            assert bank.open()[axis.slice].tolist() == [bool(each) for each in z]
        assert model(x).isfinite().all()
        assert difference(model, l0prune.export(model), x) <= 1e-10


def test_samples_keep_one_too():
    model, x = gated("spectral_block")
    bank = l0prune.gates(model)
    with torch.no_grad():
        bank.log_alpha.fill_(-20.0)
    model.train()(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    open_ = bank.current() > 0
    assert [int(open_[axis.slice].sum()) for axis in bank.plan.axes if axis.keeps_one] == [1, 1]


@pytest.mark.parametrize("name", NORMED[:2])
def test_a_branch_has_no_switch_on_what_would_be_0_by_0(name):
    module, shape, _ = MADE_WEIGHTS[name]
    found = l0prune.survey(copy.deepcopy(module).eval(), (torch.randn(shape),), own_class=False)
    assert found.branches == ()


def test_a_branch_that_ends_after_a_norm_has_one():
    """What is zero after the norm closes it: the scale, not the weight."""
    model = Fn(
        lambda m, x: m.o((y := m.i(x)) + m.s * m.b(F.relu(m.a(y)))),
        i=nn.Linear(10, 8),
        a=nn.Linear(8, 6),
        b=nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        s=nn.Parameter(torch.ones(8)),
        o=nn.Linear(8, 3),
    ).eval()
    x = torch.randn(2, 10)
    (branch,) = l0prune.survey(model, (x,), own_class=False).branches
    assert branch.tensors == ("s",)


def test_gates_of_which_none_need_stay_can_all_close():
    """Without a norm nothing divides: an axis closes completely, and its weights are zero."""
    plan = l0prune.survey(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), X).plan
    assert not any(axis.keeps_one for axis in plan.axes)


X = (torch.randn(2, 4),)


@pytest.mark.parametrize(
    ("by", "keeps"),
    [
        (lambda h: h / (h.std(1, keepdim=True) + 1e-3), True),  # its gradient is 0/0
        (lambda h: h / (h.var(1, keepdim=True) + 1e-3).sqrt(), False),
        (lambda h: h / h.square().sum(1, keepdim=True), True),
        (lambda h: F.normalize(h, dim=1), False),
    ],
)
@pytest.mark.one_in(2)
def test_of_activations(by, keeps):
    model = Fn(lambda m, x: m.b(by(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    found = l0prune.survey(model.eval(), X, own_class=False)
    assert {axis.name: axis.keeps_one for axis in found.axes}["a"] == keeps


def test_while_the_model_is_cut_it_is_one_of_those_that_are_left():
    model, _ = gated("spectral_block")
    bank = l0prune.gates(model)
    kept = torch.ones(bank.plan.size, dtype=torch.bool)
    with torch.no_grad():
        bank.log_alpha.fill_(-20.0)
        bank.log_alpha[:8] = torch.tensor([0.0, 3, 1, 2, 0, 0, 0, 0]) - 20
    kept[1] = kept[3] = False
    assert bank.z()[:8].nonzero().tolist() == [[1]]
    bank.cut_to(kept)
    assert bank.z()[:8].nonzero().tolist() == [[2]]
