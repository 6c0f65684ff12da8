"""Gates act on what a forward gets by ``named_parameters()``, and on nothing outside of it."""

import copy
import pickle

import torch
from torch import nn
from torch.func import functional_call

import l0prune

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()


class Fast(nn.Module):
    """Runs its body with its weights, and with weights that are made of them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))

    def forward(self, x):
        fast = {name: p - 0.1 * p.sin() for name, p in self.body.named_parameters()}
        return functional_call(self.body, fast, (x,)) + self.body(x)


class Averaged(nn.Module):
    """Moves a second layer towards the first in its forward, as momentum encoders do."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        if self.training:
            for one, two in zip(self.first.parameters(), self.other.parameters(), strict=True):
                two.data.mul_(0.9).add_(one.data, alpha=0.1)
        norm = sum(p.square().sum() for p in self.last.parameters())
        return self.last(self.first(x).relu() + self.other(x)) * norm


def gated(model):
    torch.manual_seed(0)
    model = l0prune.gate(model.double().eval(), X)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9.0
    return model


def test_fast_weights_are_made_of_gated_ones_and_exported_exactly():
    torch.manual_seed(1)
    model = gated(Fast())
    assert {"body.0", "body.2"} <= set(l0prune.gates(model).plan.names)
    small = l0prune.export(model)
    assert small.rebuilt
    assert small.params < small.params_before
    for twin in (small.module, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(X), model(X), rtol=1e-10, atol=1e-12)
    # and where the same is written out by hand
    bank, plain = l0prune.gates(model), Fast().double()
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "l0prune" not in n})
    state = dict(plain.named_parameters())
    for site in bank.plan.sites:
        values = bank.plan.spread(site.layout, bank.z().double())
        shape = [-1 if dim == site.dim else 1 for dim in range(state[site.tensor].ndim)]
        state[site.tensor].data.mul_(values.view(shape))
    torch.testing.assert_close(plain(X), model(X))


def test_outside_of_the_forward_the_stored_ones_are_handed_out():
    model = gated(Fast())
    stored = {n: p for n, p in model.named_parameters() if "l0prune" not in n}
    assert all(isinstance(p, nn.Parameter) for p in model.body.parameters())
    assert all(stored[f"body.{n}"] is p for n, p in model.body.named_parameters())
    assert all(n.startswith("x.") for n, _ in model.body.named_parameters("x"))
    model.train()
    model(X).sum().backward()
    assert all(p.grad is not None for p in stored.values())
    l0prune.ungate(model)
    assert all("named_parameters" not in vars(module) for module in model.modules())


def test_a_write_in_the_forward_goes_to_the_parameter():
    torch.manual_seed(0)
    plain = Averaged().double()
    model = copy.deepcopy(plain)
    l0prune.gate(model, X)
    plain.train()(X)
    model.train()(X)
    torch.testing.assert_close(model.other._parameters["weight"], plain.other.weight)


def test_the_gates_of_other_models_put_nothing_on_modules():
    model = gated(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert all("named_parameters" not in vars(module) for module in model.modules())


class OfState(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x):
        y = self.b(self.a(x).relu()).relu()
        return self.c(y) + nn.functional.linear(y, self.c.state_dict()["weight"])


def test_a_weight_out_of_a_state_is_pinned_and_no_other():
    survey = l0prune.survey(OfState().eval(), X.float())
    assert [axis.name for axis in survey.plan.axes] == ["a", "a.in"]
    (pin,) = [pin for pin in survey.pins if pin.where == "b.weight dim 0"]
    assert "state_dict(), where no gate reaches it" in pin.reason
    assert pin.source.startswith("test_named_members.py:")


def test_a_plan_says_which_are_handed_out():
    survey = l0prune.survey(Fast().eval(), X.float())
    names = survey.plan.code.by_name
    assert {"body.0.weight", "body.3.bias"} <= set(names)
    again = type(survey.plan).from_json(survey.plan.to_json())
    assert again.code.by_name == names
