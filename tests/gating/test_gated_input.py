"""A first layer whose gates learn from its weight's gradient: as if they multiplied the weight."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.gating import gated_layer
from l0prune.gating.kinds.binary_concrete import BinaryConcrete
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification
from l0prune.gating.kinds.hard_concrete import HardConcrete

KINDS = (HardConcrete, BinaryConcrete, ContinuousSparsification)
SHAPES = {"batch": (2, 20), "tokens": (2, 3, 20), "one": (20,)}


@pytest.fixture
def used(monkeypatch):
    """How often the layer is asked for."""
    count = []
    kind = gated_layer.GatedInput

    class Counted:
        @staticmethod
        def apply(*args):
            count.append(1)
            return kind.apply(*args)

    monkeypatch.setattr(gated_layer, "GatedInput", Counted)
    return count


def model_of(kind=HardConcrete, shape=(2, 20), *, bias=True):
    """Doubles in training mode, with gates that are closed, open and between."""
    torch.manual_seed(0)
    layers = (nn.Linear(20, 30, bias=bias), nn.Tanh(), nn.Linear(30, 4))
    model = nn.Sequential(*layers).double()
    x = torch.randn(shape, dtype=torch.float64)
    model = l0prune.gate(model, (torch.randn(2, 20).double(),), gate=kind())
    with torch.no_grad():
        l0prune.gates(model).log_alpha.normal_(std=2)
    return model.train(), x


def gradients(model, x, *, graph=False):
    torch.manual_seed(1)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(model(x).square().sum(), [*parameters.values()], create_graph=graph)
    return dict(zip(parameters, found, strict=True))


def slowly(monkeypatch, model, x, **how):
    """By the weights that the gates multiply."""
    with monkeypatch.context() as patch:
        for kind in KINDS:
            patch.setattr(kind, "is_flat_at_zero", False)
        return gradients(model, x, **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.one_in(18)
def test_gradients_are_those_of_gated_weights(kind, shape, bias, used, monkeypatch):
    model, x = model_of(kind, SHAPES[shape], bias=bias)
    wanted = slowly(monkeypatch, model, x)
    assert not used
    found = gradients(model, x)
    assert len(used) == 1
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)
    z = l0prune.gates(model).current()
    assert kind is not HardConcrete or (0 < int((z == 0).sum()) < len(z))


def test_a_gradient_that_is_differentiated(used, monkeypatch):
    """As in MAML, or a product with the Hessian: what z does to the weight's gradient counts."""
    model, x = model_of()
    second = []
    for first in (gradients, lambda *a, **k: slowly(monkeypatch, *a, **k)):
        found = first(model, x, graph=True)
        loss = found["0.weight"].square().sum() + found["0.bias"].sum()
        second.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert len(used) == 1
    for mine, theirs in zip(*second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_gates_that_stand_multiply_the_input(used):
    model, x = model_of()
    l0prune.gates(model).fixed = True
    with torch.no_grad():
        wanted = model(x)
    torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)
    assert not torch.equal(model(x), wanted)  # the last bits tell which of them was multiplied
    model(x).sum().backward()
    weight = model._modules["0"]._parameters["weight"]
    (inputs,) = (axis for axis in l0prune.gates(model).axes if axis.kind == "input")
    closed = l0prune.gates(model).z()[inputs.slice] == 0
    assert closed.any()
    assert not weight.grad[:, closed].any()
    assert not used


def test_multipliers_that_are_given_have_a_gradient_at_zero(used):
    model, x = model_of()
    (inputs,) = (axis for axis in l0prune.gates(model).axes if axis.kind == "input")
    z = torch.ones(l0prune.gates(model).plan.size, dtype=torch.float64)
    z[inputs.slice] = 0
    with l0prune.gates(model).using(z.requires_grad_()):
        model(x).sum().backward()
    assert z.grad[inputs.slice].all()
    assert not used


def test_where_the_weights_gradient_does_not_tell_it_is_not_asked(used):
    model, x = model_of()
    model._modules["0"]._parameters["weight"].requires_grad_(False)
    model(x).sum().backward()
    assert l0prune.gates(model).log_alpha.grad.any()
    model, x = model_of()
    with torch.autocast("cpu", torch.bfloat16):
        model.float()(x.float()).sum().backward()
    model.double()(x.expand(50, 2, 20)).sum().backward()  # more numbers than the weight has
    assert not used
