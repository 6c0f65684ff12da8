"""Example inputs that a model changes, that cannot be copied, or of classes of their own."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from deadness import close_some, randomise
from differences import as_graph, of_scale, run_onnx
from networks import Fn
from round_trips import through_torch
from torch import nn

import l0prune
from l0prune.capture.example_inputs import Held, call, keep, plain
from l0prune.errors import FileError, UsageError


class Memory:
    """Keys and values of the steps before, and how many calls there were."""

    def __init__(self, *tensors):
        self.layers, self.calls = [{"kv": tensor} for tensor in tensors], 0

    def update(self, number, new):
        self.calls += 1
        kv = torch.cat([self.layers[number]["kv"], new], 1)
        self.layers[number]["kv"] = kv
        return kv


class Step(nn.Module):
    """One step with a memory, which its first layer meets."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, memory):
        seen = memory.update(0, self.a(x))
        return self.c(self.b(seen.mean(1)).relu()) * memory.calls


def gated():
    torch.manual_seed(0)
    model, memory = randomise(Step()).eval(), Memory(torch.randn(2, 4, 6))
    inputs = torch.randn(2, 1, 5), memory
    l0prune.gate(model, inputs, dynamic_shapes={"memory": [{1: "past"}]}, exclude="*.in")
    assert memory.layers[0]["kv"].shape == (2, 4, 6)
    assert memory.calls == 0
    return close_some(model)


def test_each_call_gets_a_memory_of_its_own(tmp_path):
    model = gated()
    assert [axis.name for axis in l0prune.gates(model).axes] == ["a", "b"]
    dense = l0prune.export(model)
    stays = dense.kept[dense.plan.axes[0].slice]
    assert 0 < stays.sum() < 6
    assert dense.rebuilt, dense.note
    assert dense.params < dense.params_before
    assert "a list of its tensors" in dense.note
    dense.save_onnx(tmp_path / "model.onnx")
    x, kept = torch.randn(3, 1, 5), torch.randn(3, 9, 6)
    with torch.no_grad():
        expected = model(x, Memory(kept))
        small = kept[..., stays]
        program = dense.program.module()(x, [small])
        found = [
            dense.module(x, Memory(small)),
            program,
            *run_onnx(tmp_path / "model.onnx", x, small),
        ]
    assert all(of_scale(expected, each) <= 1e-5 for each in found)


def test_a_graph_takes_the_slots_of_a_memory_that_stayed():
    model = gated()
    with as_graph():
        small = l0prune.export(model)
    assert not small.rebuilt
    stays, x, kept = (
        small.kept[small.plan.axes[0].slice],
        torch.randn(2, 1, 5),
        torch.randn(2, 4, 6),
    )
    with torch.no_grad():
        expected, found = model(x, Memory(kept)), small.module(x, [kept[..., stays]])
    assert of_scale(expected, found) <= 1e-5
    with pytest.raises(RuntimeError, match="has to measure"):
        small.module(x, [kept])


def test_an_object_that_is_only_read_is_data_and_stays_whole():
    forward = lambda m, x, data: m.b((m.a(x) + data.layers[0]["kv"]).relu())  # noqa: E731
    net = Fn(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 2))
    found = l0prune.survey(net, (torch.randn(2, 5), Memory(torch.randn(2, 6))))
    assert "a" not in [axis.name for axis in found.axes]
    (pin,) = [pin for pin in found.pins if pin.where == "a.weight dim 0"]
    assert "the model's input" in pin.reason


@pytest.mark.slow
def test_a_gated_model_with_such_an_example_is_copied_and_pickled():
    model = gated()
    for again in (copy.deepcopy(model), through_torch(model)):
        (_, held), _ = l0prune.gates(again).example
        assert held.opened().layers[0]["kv"] is held.tensors[0]
        assert l0prune.export(again).params == l0prune.export(model).params


def test_a_file_of_a_gated_model_cannot_hold_an_object_and_says_so(tmp_path):
    with pytest.raises(FileError, match="the example inputs hold a Memory"):
        l0prune.save(gated(), tmp_path / "model.l0")


def test_a_survey_leaves_what_it_is_given_as_it_was():
    def forward(m, x, past, named):
        past.append(m.a(x))
        named["sum"] = named["sum"] + past[0]
        return m.b(torch.cat(past, 1)) * named["sum"].mean()

    net = Fn(forward, a=nn.Linear(5, 6), b=nn.Linear(12, 2))
    past, named = [torch.randn(2, 6)], {"sum": torch.ones(2, 6)}
    found = l0prune.survey(net, (torch.randn(2, 5), past, named))
    assert [axis.name for axis in found.axes]
    assert len(past) == 1
    assert named["sum"].equal(torch.ones(2, 6))


def test_what_cannot_be_copied_is_refused_before_anything_is_done():
    memory = Memory(torch.randn(2, 4, 6))
    memory.lock = threading.Lock()
    model = Step()
    with pytest.raises(UsageError, match=r"input memory \(a Memory\) cannot be copied.*lock"):
        l0prune.gate(model, (torch.randn(2, 1, 5), memory))
    assert not any(isinstance(each, l0prune.gating.bank.Gates) for each in model.modules())


class Pixels(torch.Tensor):
    """A tensor with a class of its own."""


class Doubled(torch.Tensor):
    """A tensor that is read as twice what it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return 2 * func(args[0].as_subclass(torch.Tensor), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)


def test_a_class_of_tensors_that_changes_nothing_is_taken_as_a_plain_one():
    model, x = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(5, 6), b=nn.Linear(6, 2)), torch.randn(2, 5)
    l0prune.gate(model, x.as_subclass(Pixels))
    ((kept,), _) = l0prune.gates(model).example
    assert type(kept) is torch.Tensor
    assert kept.equal(x)
    assert l0prune.export(close_some(model)).params


def test_a_class_of_tensors_that_changes_what_is_computed_is_refused_by_name():
    model, x = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(5, 6), b=nn.Linear(6, 2)), torch.randn(2, 5)
    with pytest.raises(UsageError, match="input 0 is a Doubled"):
        l0prune.gate(model, x.as_subclass(Doubled))


def test_an_object_is_a_node_whose_leaves_are_its_tensors():
    first = torch.randn(2, 3)
    memory = Memory(first, first, torch.ones(2, 1, dtype=torch.int64))
    inputs = keep(Step(), (torch.randn(2, 1, 5), memory), {})
    held = inputs[0][1]
    assert isinstance(held, Held)
    assert [tensor.shape for tensor in held.tensors] == [(2, 3), (2, 1)]  # one object, twice
    opened = held.opened()
    assert opened.layers[0]["kv"] is opened.layers[1]["kv"]
    assert plain(inputs)[0][1] == list(held.tensors)
    counts = [call(Fn(lambda m, x, memory: memory.update(2, memory.layers[2]["kv"]).sum()), inputs)
        for _ in range(2)]  # fmt: skip
    assert counts == [4, 4]
