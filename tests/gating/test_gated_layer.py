"""A layer's input is multiplied in its weight's place where that is smaller: the same function."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import l0prune
from l0prune.gating.gated_layer import scale


class Own(nn.Linear):
    """A forward of its own, which reads its weight in another way."""

    def forward(self, input):
        return nn.functional.linear(input, self.weight / self.weight.norm(), self.bias)


class Standardised(nn.Conv2d):
    """Torch's forward around a convolution of its own."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def between(first, last, flat=False):
    return nn.Sequential(first, nn.Tanh(), *([nn.Flatten()] if flat else []), last)


# By name: the network, the shape of its inputs, and does the second layer multiply its input?
CASES = {
    "linear": (lambda: between(nn.Linear(3, 20), nn.Linear(20, 30)), (2, 3), True),
    "tokens": (lambda: between(nn.Linear(3, 20), nn.Linear(20, 30)), (2, 5, 3), True),
    "many": (lambda: between(nn.Linear(3, 20), nn.Linear(20, 30)), (31, 3), False),
    "flat": (lambda: between(nn.Conv2d(2, 4, 3), nn.Linear(64, 30), True), (2, 2, 6, 6), True),
    "conv1d": (lambda: between(nn.Conv1d(2, 8, 3), nn.Conv1d(8, 9, 3)), (2, 2, 8), True),
    "conv2d": (lambda: between(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 9, 3)), (2, 2, 6, 6), True),
    "conv3d": (lambda: between(nn.Conv3d(2, 8, 2), nn.Conv3d(8, 9, 2)), (2, 2, 3, 3, 3), True),
    "mirrored": (
        lambda: between(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 9, 3, padding=1, padding_mode="reflect")),
        (2, 2, 5, 5),
        True,
    ),
    "grouped": (
        lambda: between(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 32, 3, groups=2)),
        (2, 2, 5, 5),
        False,
    ),
    "own forward": (lambda: between(nn.Linear(3, 20), Own(20, 30)), (2, 3), False),
    "own convolution": (
        lambda: between(nn.Conv2d(2, 8, 3), Standardised(8, 9, 3)),
        (2, 2, 5, 5),
        False,
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    """A gated network of doubles, its plain twin, its gates' multipliers, inputs."""
    make, shape, is_input = CASES[request.param]
    torch.manual_seed(0)
    plain = make().double()
    model = l0prune.gate(copy.deepcopy(plain), (torch.randn(shape, dtype=torch.float64),))
    z = torch.rand(l0prune.gates(model).plan.size, dtype=torch.float64).requires_grad_()
    return model, plain, z, torch.randn(shape, dtype=torch.float64), is_input


def by_weights(model, plain, z, x):
    """The outputs of the plain network with weights that the gates multiply."""
    plan = l0prune.gates(model).plan
    parameters = dict(plain.named_parameters())
    for site in plan.sites:
        values = plan.spread(site.layout, z)
        parameters[site.tensor] = scale(parameters[site.tensor], values, site.dim)
    return functional_call(plain, parameters, (x,))


@pytest.mark.one_in(3)
def test_outputs_and_gradients_are_those_of_gated_weights(case):
    model, plain, z, x, is_input = case
    with l0prune.gates(model).using(z):
        ours = model(x)
    theirs = by_weights(model, plain, z, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours, theirs) != is_input  # the last bits tell which of them was multiplied
    seed = torch.randn_like(ours)
    mine = [p for n, p in model.named_parameters() if "log_alpha" not in n]
    of_ours = torch.autograd.grad((ours * seed).sum(), [z, *mine])
    of_theirs = torch.autograd.grad((theirs * seed).sum(), [z, *plain.parameters()])
    for our, their in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-11, atol=1e-12)


@pytest.mark.one_in(3)
def test_without_gradients_it_is_the_weight_to_the_bit(case):
    model, plain, z, x, _ = case
    with torch.no_grad(), l0prune.gates(model).using(z):
        assert torch.equal(model(x), by_weights(model, plain, z, x))


def test_one_example_without_a_batch():
    model = l0prune.gate(CASES["conv2d"][0](), (torch.randn(2, 2, 6, 6),)).eval()
    x = torch.randn(2, 6, 6)
    with torch.no_grad():
        l0prune.gates(model).log_alpha.normal_()
        wanted = model(x)
    torch.testing.assert_close(model(x), wanted)


def test_second_derivatives():
    model = l0prune.gate(CASES["linear"][0]().double(), (torch.randn(2, 3).double(),))
    gates, x = l0prune.gates(model), torch.randn(2, 3, dtype=torch.float64)
    z = torch.rand(gates.plan.size, dtype=torch.float64).requires_grad_()

    def squared(z):
        with gates.using(z):
            return model(x).square().sum()

    assert torch.autograd.gradgradcheck(squared, (z,))


def test_a_tensor_in_the_weights_place_is_gated_where_the_whole_model_is_called_with_it():
    model = l0prune.gate(CASES["linear"][0](), (torch.randn(2, 3),)).eval()
    gates, x = l0prune.gates(model), torch.randn(2, 3)
    with torch.no_grad():
        gates.log_alpha.normal_()
    doubled = {"2.weight": 2 * model._modules["2"]._parameters["weight"].detach()}
    bias = model[2].bias
    torch.testing.assert_close(functional_call(model, doubled, (x,)) - bias, 2 * (model(x) - bias))
