"""The model itself is looked at, and not only the copy that an export works on."""

from __future__ import annotations

import copy

import pytest
import torch
from models import small
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.exporting.certify.live import check_copy


class Forgetful(nn.Module):
    """Its copies have the temperature that it began with."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.temperature = 1.0

    def forward(self, x):
        return self.last(torch.relu(self.first(x) * self.temperature))

    def __getstate__(self):
        return {**vars(self), "temperature": 1.0}


class Careless(Forgetful):
    """Its copies have no temperature of their own."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "temperature"}

    @property
    def temperature(self):
        return vars(self).get("temperature", 1.0)

    @temperature.setter
    def temperature(self, value):
        vars(self)["temperature"] = value


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        (Forgetful, "0.temperature, 1.0 in place of -3.0"),
        (Careless, "0.temperature, which it has not"),
    ],
)
def test_what_copies_lose_is_refused_by_name(kind, lost):
    model = nn.Sequential(kind(), nn.ReLU()).eval()
    x = torch.randn(2, 5)
    l0prune.gate(model, x)
    l0prune.export(model)
    model[0].temperature = -3.0
    with pytest.raises(UsageError) as raised:
        l0prune.export(model)
    assert f"The copy has lost: {lost}." in str(raised.value)
    assert torch.equal(model(x), model(x))


class Counting(nn.Module):
    """Writes into a buffer and an attribute, and has two modes."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = self.layer(self.drop(x))
        return self.last


def test_a_model_that_is_looked_at_is_as_it_was():
    model = Counting()
    model.drop.eval()
    x, state = torch.randn(2, 4), copy.deepcopy(model.state_dict())
    before = torch.random.get_rng_state()
    assert check_copy(model, ((x,), {})) == ""
    assert model.training
    assert not model.drop.training
    assert model.last is None
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_forward_that_another_package_has_put_around_it_is_no_difference():
    model, x = small().eval(), torch.randn(2, 4)
    own = model.forward
    model._original_forward = own
    model.forward = lambda *args: own(*args) + 1
    assert check_copy(model, ((x,), {})) == ""
    assert "_original_forward" in vars(model)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.tensor(next(self.draws))

    def __init__(self):
        super().__init__()
        self.draws = iter(torch.arange(100.0).tolist())

    def __deepcopy__(self, memo):
        return Noisy()


def test_random_numbers_of_its_own_prove_nothing():
    assert check_copy(Noisy(), ((torch.zeros(2, 4),), {})) == ""


class Alone(nn.Linear):
    """Runs either where it is or as a copy."""

    is_copy, runs_as_copy = False, True

    def forward(self, x):
        if self.is_copy != self.runs_as_copy:
            raise RuntimeError("not here")
        return super().forward(x)

    def __deepcopy__(self, memo):
        again = Alone(self.in_features, self.out_features)
        again.load_state_dict(self.state_dict())
        again.is_copy, again.runs_as_copy = True, self.runs_as_copy
        return again


@pytest.mark.parametrize(
    ("runs_as_copy", "whose"), [(True, "The model itself"), (False, "A copy of the model")]
)
def test_a_model_that_cannot_be_run_where_it_is_is_said(runs_as_copy, whose):
    model = Alone(3, 4)
    model.runs_as_copy = runs_as_copy
    said = check_copy(model, ((torch.zeros(2, 3),), {}))
    assert said.startswith(f"{whose} could not be run on its example")
    assert said.endswith("RuntimeError: not here.")


class Memory:
    """An object among the inputs, which a forward writes into."""

    def __init__(self):
        self.rows = torch.randn(2, 5)


class Remembering(Forgetful):
    def forward(self, x, memory):
        memory.rows = torch.cat([memory.rows, x])
        return super().forward(x + memory.rows[:2])


def test_a_model_with_an_object_among_its_inputs_is_looked_at():
    model = Remembering().eval()
    l0prune.gate(model, (torch.randn(2, 5), Memory()))
    model.temperature = -3.0
    with pytest.raises(UsageError, match=r"has lost: temperature, 1\.0 in place of -3\.0"):
        l0prune.export(model)
