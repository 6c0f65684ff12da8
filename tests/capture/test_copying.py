"""Copies of models that keep functions which speak of the model itself."""

import functools
import threading
import types

import pytest
import torch
from deadness import close_some, randomise
from torch import nn

import l0prune
from l0prune.capture.copying import copied
from l0prune.errors import NothingToPrune, UsageError


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.store()

    def store(self):
        pass

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class ALambda(Base):
    def store(self):
        self.run = lambda x: self.last(torch.relu(self.first(x)))

    def forward(self, x):
        return self.run(x)


class ADefault(ALambda):
    def store(self):
        def run(x, *, layers=(self.first, self.last)):
            return layers[1](torch.relu(layers[0](x)))

        self.runs = [{"run": functools.partial(run)}]
        self.run = self.runs[0]["run"]


class TwoDeep(ALambda):
    def store(self):
        inner = lambda x: self.first(x)  # noqa: E731
        self.run = lambda x: self.last(torch.relu(inner(x)))


class AMethod(Base):
    def store(self):
        plain = self.forward
        self.forward = types.MethodType(lambda module, x: plain(x) * 1, self)


class Hooked(Base):
    """Features that a hook notes, as extractors do."""

    def store(self):
        self.features = []
        self.first.register_forward_hook(lambda _, args, out: self.features.append(out))

    def forward(self, x):
        self.features.clear()
        self.first(x)
        return self.last(torch.relu(self.features[0]))


KINDS = (ALambda, ADefault, TwoDeep, AMethod, Hooked)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_computes_with_its_own_weights(kind):
    model, x = randomise(kind()), torch.randn(2, 4)
    before = model(x)
    again = copied(copied(model))
    torch.testing.assert_close(again(x), before)
    for parameter in model.parameters():
        parameter.zero_()
    torch.testing.assert_close(again(x), before)


@pytest.mark.parametrize("kind", KINDS)
def test_such_models_are_exported(kind):
    x = torch.randn(3, 4)
    model = close_some(l0prune.gate(randomise(kind()).eval(), x, exclude="*.in"))
    small = l0prune.export(model)
    assert small.rebuilt
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(x), model(x), rtol=1e-4, atol=1e-5)


def test_functions_of_others_stay_what_they_are():
    other = nn.Linear(4, 4)
    model = Base()
    model.run, model.relu = lambda x: other(x), torch.relu
    again = copied(model)
    assert again.run is model.run
    assert again.relu is torch.relu


def test_what_stands_for_an_object_is_taken():
    model = ALambda()
    weight = nn.Parameter(torch.zeros(8, 4))
    again = copied(model, {id(model.first.weight): weight})
    assert again.first.weight is weight
    assert again.run.__closure__[0].cell_contents is again


ANYWHERE: list[nn.Module] = []


def test_weights_that_are_reached_by_a_global_are_pinned_before_training():
    class ByGlobal(Base):
        def forward(self, x):
            return ANYWHERE[0].last(torch.relu(ANYWHERE[0].first(x)))

    model, x = randomise(ByGlobal()).eval(), torch.randn(3, 4)
    ANYWHERE[:] = [model]
    with pytest.raises(NothingToPrune, match="a weight by a road on which no gate acts"):
        l0prune.gate(model, x)


def test_what_a_forward_left_in_the_midst_of_a_graph_is_copied_without_it():
    model = ALambda()
    model.kept = [model(torch.randn(2, 4)).mean()] * 2
    again = copied(model)
    assert torch.equal(again.kept[0], model.kept[0])
    assert again.kept[0] is again.kept[1]
    assert again.kept[0].is_leaf
    assert not again.kept[0].requires_grad
    assert model.kept[0].grad_fn is not None


def test_what_cannot_be_copied_is_said_in_words():
    model = Base()
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"the model cannot be copied, .*lock"):
        copied(model)
