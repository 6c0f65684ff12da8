"""Tensors put in the place of parameters for a call: whose gates count for them."""

import pytest
import torch
from handmade import folded, gated, mlp, mlp_plan
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import l0prune
from l0prune.errors import UsageError
from l0prune.gating.attaching import gates_of

X = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


def other_weights(model):
    named = dict(model.named_parameters())
    return {n: torch.randn_like(p) for n, p in named.items() if not n.startswith("l0prune")}


@pytest.mark.parametrize("as_parameters", [False, True])
def test_weights_given_to_the_whole_model_are_gated(as_parameters):
    model, plain = gated(mlp(), mlp_plan()).eval(), mlp()
    given = other_weights(model)
    plain.load_state_dict(given)
    wanted = folded(plain, mlp_plan(), gates_of(model).z())(X)
    if as_parameters:
        given = {name: nn.Parameter(tensor) for name, tensor in given.items()}
    torch.testing.assert_close(functional_call(model, given, X), wanted)
    some = {"4.weight": model[4]._parameters["weight"] * 2.0, "4.bias": model[4].bias}
    torch.testing.assert_close(
        functional_call(model, some, X) - model[4].bias, 2 * (model(X) - model[4].bias)
    )


def test_an_ensemble_of_gated_models_runs_at_once():
    models = [gated(mlp(), mlp_plan(), seed).eval() for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    found = vmap(lambda p, b: functional_call(models[0], (p, b), X))(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([model(X) for model in models]))


class Generated(nn.Module):
    """Runs a layer with its own weight, and again with one that is made for it."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.made = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.layer(torch.tanh(self.first(x)))
        return self.last(functional_call(self.layer, {"weight": self.made}, torch.tanh(x)))


def test_what_the_forward_puts_into_a_layer_is_not_multiplied_by_its_gates():
    model, x = Generated().double().eval(), torch.randn(4, 6).double()
    l0prune.gate(model, x, open_probability=0.5, jitter=2.0)
    small = l0prune.export(model)
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(x), model(x), rtol=1e-10, atol=1e-12)


def test_a_layer_called_by_itself_with_another_tensor_is_refused():
    model = gated(mlp(), mlp_plan()).eval()
    foreign = torch.randn_like(model[2]._parameters["weight"])
    with pytest.raises(UsageError, match=r"in the place of Linear.weight.*the whole gated model"):
        functional_call(model[2], {"weight": foreign}, torch.randn(5, 8))
    own = dict(model[2].named_parameters())
    hidden = torch.randn(5, 8)
    assert torch.equal(functional_call(model[2], own, hidden), model[2](hidden))


def test_fast_weights_learn_through_the_gates():
    """The inner step of MAML, by torch.func, and the same by a backward pass."""
    model = gated(mlp().double(), mlp_plan()).eval()
    x, given = X.double(), dict(model.named_parameters())
    inner = torch.func.grad(lambda w: functional_call(model, w, x).square().sum())(given)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(inner[name], parameter.grad, rtol=1e-10, atol=1e-12)
