"""Weights that a module keeps in a list of its own, as nn.LSTM does."""

import copy

import pytest
import torch
from handmade import bank
from round_trips import through_pickle, through_torch
from torch import nn

from l0prune.gating.attaching import attach, bypass, detach, gates_of
from l0prune.plan.layout import Slots
from l0prune.plan.plan import Axis, Plan, Site

X = torch.randn(3, 5, 7)


def plan() -> Plan:
    sites = tuple(Site(f"weight_hh_l{layer}", 1, Slots(0, 0, 6), "read") for layer in (0, 1))
    sites += (Site("weight_ih_l1", 1, Slots(0, 0, 6), "read"),)
    return Plan((Axis("units", "neuron", 6, 0, 1),), (), {}, sites, ())


def lstm() -> nn.LSTM:
    return nn.LSTM(7, 6, num_layers=2, batch_first=True)


def gated(layer: nn.Module) -> nn.Module:
    attach(layer, bank(plan()))
    return layer.eval()


def by_hand(layer: nn.Module, z: torch.Tensor) -> nn.Module:
    """A plain copy whose weights are multiplied by z."""
    twin = lstm()
    state = {
        name: p.detach().clone() for name, p in layer.named_parameters() if "gates" not in name
    }
    for site in plan().sites:
        state[site.tensor] *= z
    twin.load_state_dict(state)
    return twin.eval()


def is_plain(layer: nn.Module) -> bool:
    kept = zip(vars(layer)["_flat_weights"], layer._flat_weights_names, strict=True)
    return all(entry is layer._parameters[name] for entry, name in kept)


def test_every_weight_in_the_list_is_gated():
    layer = gated(lstm())
    wanted = by_hand(layer, gates_of(layer).z())(X)[0]
    assert torch.equal(layer(X)[0], wanted)
    with torch.no_grad():
        gates_of(layer).log_alpha.neg_()
    wanted = by_hand(layer, gates_of(layer).z())(X)[0]
    assert torch.equal(layer(X)[0], wanted)  # the list is never one of the last forward
    with bypass(layer):
        assert torch.equal(layer(X)[0], by_hand(layer, torch.ones(6))(X)[0])
    assert torch.equal(layer(X)[0], wanted)


def test_weights_and_gates_learn_through_the_list():
    layer = gated(lstm()).train()
    layer(X)[0].square().sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("travel", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("mode", ["fresh", "after a forward", "after a backward"])
def test_a_list_of_weights_can_be_copied_and_pickled(travel, mode):
    layer = gated(lstm())
    wanted = copy.deepcopy(layer)(X)[0]
    if mode != "fresh":
        y = layer.train()(X)[0]
    if mode == "after a backward":
        y.sum().backward()
    twin = travel(layer).eval()
    assert torch.equal(twin(X)[0], wanted)
    assert is_plain(twin)
    assert is_plain(layer)
    assert all(p is not q for p, q in zip(twin.parameters(), layer.parameters(), strict=True))


def test_a_layer_that_was_gated_is_plain_again():
    plain = lstm().eval()
    wanted = plain(X)[0]
    layer = gated(copy.deepcopy(plain))
    layer.train()(X)
    detach(layer)
    assert is_plain(layer)
    assert torch.equal(copy.deepcopy(layer.eval())(X)[0], wanted)
    assert torch.equal(layer(X)[0], wanted)


def test_it_can_be_converted_and_given_other_weights():
    layer = gated(lstm())
    double = copy.deepcopy(layer).double()
    assert torch.allclose(double(X.double())[0].float(), layer(X)[0], atol=1e-6)
    assert {entry.dtype for entry in vars(double)["_flat_weights"]} == {torch.float64}
    layer(X)
    layer.weight_hh_l1 = nn.Parameter(torch.randn(24, 6))
    assert torch.equal(layer(X)[0], by_hand(layer, gates_of(layer).z())(X)[0])
    assert is_plain(layer)


def test_a_list_of_the_users_own():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
            self.weights = [self.first, self.last, "a name"]

        def forward(self, x):
            return x @ self.weights[0] @ self.weights[1]

    model, x = Listed(), torch.randn(2, 4)
    sites = (Site("first", 1, Slots(0, 0, 4), "read"),)
    attach(model, bank(Plan((Axis("a", "neuron", 4, 0, 1),), (), {}, sites, ())))
    z = gates_of(model.eval()).z()
    assert torch.equal(model(x), x @ (model._parameters["first"] * z) @ model.last)
    assert model.weights[2] == "a name"
    twin = copy.deepcopy(model)
    assert twin.weights[1] is twin.last
    assert torch.equal(twin(x), model(x))
