import copy
import inspect

import pytest
import torch
from handmade import gated, lenet, lenet_plan, mlp, mlp_plan
from round_trips import through_pickle, through_torch
from torch import nn
from torch.fx import symbolic_trace
from torch.utils.hooks import RemovableHandle

from l0prune.gating.attaching import detach, gates_of
from l0prune.gating.gated_class import original_class
from l0prune.plan.layout import Slots
from l0prune.plan.plan import Axis, Plan, Site


class Custom(nn.Linear):
    """Has a say in its own pickling, and an attribute that it wants back."""

    def __init__(self, *sizes: int, note: str):
        super().__init__(*sizes)
        self.note = note

    def __reduce_ex__(self, protocol):
        return (_make_custom, (self.in_features, self.out_features, self.note), self.__dict__)


def _make_custom(*arguments):
    *sizes, note = arguments
    return Custom(*sizes, note=note)


def columns(name: str, size: int) -> Plan:
    site = Site(name, 1, Slots(0, 0, size), "read")
    return Plan((Axis("a", "neuron", size, 0, 1),), (), {}, (site,), ())


def check_gated_alike(twin, model, x):
    assert gates_of(twin) is not gates_of(model)
    assert torch.equal(twin.eval()(x), model.eval()(x))
    torch.manual_seed(1)
    wanted = model.train()(x)
    torch.manual_seed(1)
    assert torch.equal(twin.train()(x), wanted)


@pytest.mark.parametrize("travel", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("mode", ["fresh", "after a forward", "after a backward"])
def test_a_gated_model_can_be_copied_and_pickled(travel, mode):
    model, x = gated(lenet(), lenet_plan()), torch.randn(5, 1, 14, 14)
    if mode != "fresh":
        y = model(x)
    if mode == "after a backward":
        y.sum().backward()
    twin = travel(model)
    check_gated_alike(twin, model, x)
    drawn = gates_of(twin).current().clone()
    twin(x)
    assert not torch.equal(gates_of(twin).current(), drawn)  # its hooks draw for itself
    assert torch.equal(gates_of(model).current(), drawn)
    detach(twin)
    assert {type(m) for m in twin.modules()} == {type(m) for m in lenet().modules()}
    assert gates_of(model).plan == lenet_plan()


def test_hooks_that_get_the_numbers_of_anothers_process_push_nothing_out(monkeypatch):
    model = through_pickle(gated(mlp(), mlp_plan()))
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as where the file is loaded
    for _ in range(100):
        model.register_forward_pre_hook(lambda *_: None)
        model.register_forward_hook(lambda *_: None)
    drawn = gates_of(model).current().clone()
    model(torch.randn(5, 12))
    assert not torch.equal(gates_of(model).current(), drawn)
    assert not gates_of(model).in_forward


class Bare(nn.Module):
    """Owns its weights itself, and reads one of them twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        return (x @ self.first.T).tanh() @ self.last.T + self.first.sum()


@pytest.mark.parametrize("travel", [copy.deepcopy, through_pickle, through_torch])
def test_a_graph_is_built_anew_with_its_gates(travel):
    """FX makes another class, and forgets hooks, when a graph is copied."""
    sites = tuple(
        Site(*of)
        for of in (("first", 0, Slots(0, 0, 8), "write"), ("last", 1, Slots(0, 0, 8), "read"))
    )
    plan = Plan((Axis("a", "neuron", 8, 0, 4),), (), {}, sites, ())
    model, x = gated(symbolic_trace(Bare()), plan), torch.randn(5, 4)
    twin = travel(model)
    check_gated_alike(twin, model, x)
    detach(twin), detach(model)
    assert torch.equal(twin(x), model(x))


def test_a_part_of_a_gated_model_can_be_copied():
    model = gated(mlp(), mlp_plan())
    twin, x = copy.deepcopy(model[2]).eval(), torch.randn(5, 8)
    gates_of(model).eval()
    with torch.no_grad():
        model[2]._parameters["weight"].zero_()
    z = gates_of(model).z()[12:20]
    weight, bias = twin._parameters["weight"], twin.bias
    twin._l0prune.gates.eval()
    torch.testing.assert_close(twin(x), (x * z) @ weight.T + bias)


def test_a_class_with_its_own_reduce_survives():
    model = gated(nn.Sequential(Custom(4, 2, note="mine")), columns("0.weight", 4)).eval()
    twin, x = through_torch(model), torch.randn(3, 4)
    assert twin[0].note == "mine"
    assert original_class(twin[0]) is Custom
    assert torch.equal(twin(x), model(x))


def test_the_class_still_looks_like_the_users_own():
    model = gated(mlp(), mlp_plan())
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    for what in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(layer), what) == getattr(nn.Linear, what)
    assert repr(layer) == repr(nn.Linear(12, 8))
    assert type(layer) is type(model[2])  # one class for layers alike
    assert type(model[1]) is nn.Tanh
    assert inspect.signature(layer.forward) == inspect.signature(nn.Linear(1, 1).forward)


def test_attributes_can_be_set_and_deleted_as_on_the_original():
    model = gated(mlp(), mlp_plan()).eval()
    layer, z = model[4], gates_of(model).z()[20:]
    fresh = nn.Parameter(torch.randn(3, 6))
    layer.weight = fresh
    assert layer._parameters["weight"] is fresh
    assert dict(model.named_parameters())["4.weight"] is fresh
    assert torch.equal(layer.weight, fresh * z)
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = torch.zeros(3, 6)
    layer.weight = None
    assert layer.weight is None
    del layer.weight
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match="weight"):
        _ = layer.weight
    layer.register_parameter("weight", fresh)
    assert torch.equal(layer.weight, fresh * z)


def test_a_container_still_holds_its_own_children_only():
    plain = mlp()
    children = list(plain)
    model = gated(plain, mlp_plan())
    assert list(model) == children
    assert len(model) == 5
    assert model[-1] is children[-1]
    assert list(model[3:]) == children[3:]
    assert type(model[3:]) is nn.Sequential
    assert children[1] in model
    hidden = model.eval()[:2](torch.ones(2, 12))
    assert torch.equal(model[2:](hidden), model(torch.ones(2, 12)))


def test_a_dict_of_modules_still_holds_its_own_children_only():
    class Block(nn.ModuleDict):
        def forward(self, x):
            for layer in self.values():
                x = layer(x)
            return x

    model = Block({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)})
    gated(model, columns("b.weight", 4))
    assert list(model) == list(model.keys()) == ["a", "b"]
    assert [name for name, _ in model.items()] == ["a", "b"]
    assert len(model) == 2
    assert model["b"] is model.b
    assert model(torch.ones(2, 4)).shape == (2, 2)


def test_a_model_that_runs_all_its_children_passes_through_the_bank():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

    model = gated(Chain(), columns("second.weight", 4))
    assert model(torch.ones(2, 4)).shape == (2, 2)


def test_numbered_parameters_of_a_parameter_list_are_gated():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(4, 4), torch.randn(2, 4)])

        def forward(self, x):
            for weight in self.weights:
                x = x @ weight.T
            return x

    model = Stack().eval()
    first, second = (w.detach() for w in model.weights)
    gated(model, columns("weights.1", 4))
    z, x = gates_of(model).z(), torch.randn(3, 4)
    torch.testing.assert_close(model(x), ((x @ first.T) * z) @ second.T)
