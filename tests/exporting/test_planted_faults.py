"""Faults that are planted into a class, a graph, a program and a file are found, and none else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deadness import close_some, randomise
from torch import nn

import l0prune
from l0prune.errors import CertificateError
from l0prune.exporting import export, slice
from l0prune.exporting.network import NotThisWay
from l0prune.exporting.onnx import file
from l0prune.exporting.own_class import choice


class Net(nn.Module):
    """Two hidden layers, statistics, and a number in the code."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.act = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU()
        self.b, self.c, self.last = nn.Linear(12, 12), nn.Linear(12, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.last(self.c(torch.tanh(self.b(self.act(self.norm(self.a(x))) * 0.3))))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def gated():
    torch.manual_seed(0)
    net = randomise(Net()).eval()
    with torch.no_grad():
        for norm in (net.norm, net.last):
            norm.weight.fill_(1)
            norm.bias.zero_()
    return close_some(l0prune.gate(net, X))


def changed(layer, change, name="weight"):
    """Give a layer another parameter, or another buffer."""
    value = getattr(layer, name).detach() + 0.0
    change(value)
    is_buffer = name in layer._buffers
    setattr(layer, name, value if is_buffer else nn.Parameter(value))


def swap(rows):
    rows[[0, 1]] = rows[[1, 0]]


def adds(amount, where):
    """Plant a forward that adds an amount where that holds of the module and its input."""

    def plant(net):
        net.c.register_forward_hook(lambda m, given, y: y + amount * where(m, given[0]))

    return plant


IN_EVAL = {
    "a row that is off by 1e-6": lambda net: changed(net.b, lambda w: w[0].mul_(1 + 1e-6)),
    "slots that changed places": lambda net: changed(net.a, swap),
    "statistics of other slots": lambda net: changed(net.norm, swap, "running_mean"),
    "another ε": lambda net: setattr(net.norm, "eps", 1.1e-5),
    "a slope below zero": lambda net: setattr(net, "act", nn.LeakyReLU(1e-6)),
    "three examples": adds(1e-3, lambda m, x: len(x) == 3),
    "one example": adds(1e-3, lambda m, x: len(x) == 1),
}
IN_TRAINING = {
    "statistics that move faster": lambda net: setattr(net.last, "momentum", 0.11),
    "an amount of 1e-5": adds(1e-5, lambda m, x: m.training),
    "a layer that is left out": adds(1.0, lambda m, x: m.training),
}


def plant_into_classes(monkeypatch, fault):
    build = choice.OwnClass.build

    def faulty(self, changes):
        made = build(self, changes)
        with torch.no_grad():
            fault(made)
        return made

    monkeypatch.setattr(choice.OwnClass, "build", faulty)


def test_without_a_fault_all_of_it_passes(tmp_path):
    small = l0prune.export(gated())
    small.save_onnx(tmp_path / "m.onnx", time=False)
    assert small.rebuilt
    assert not small._manifest["rebuild"]["training"]
    assert small.program is not None


@pytest.mark.parametrize("fault", IN_EVAL)
@pytest.mark.one_in(3)
def test_a_fault_of_the_class_is_found_and_the_graph_is_right(fault, monkeypatch):
    model = gated()
    plant_into_classes(monkeypatch, IN_EVAL[fault])
    small = l0prune.export(model)
    assert not small.rebuilt
    torch.testing.assert_close(small.module(X), model(X), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fault", IN_TRAINING)
@pytest.mark.one_in(3)
def test_a_fault_of_the_class_in_training_alone_is_said(fault, monkeypatch):
    plant_into_classes(monkeypatch, IN_TRAINING[fault])
    small = l0prune.export(gated())
    assert small.rebuilt
    assert small._manifest["rebuild"]["training"]
    assert "is not to be trained on" in small.note


def of_literals(graph):
    (node,) = (n for n in graph.graph.nodes if 0.3 in n.args)
    node.args = tuple(0.3 + 1e-8 if arg == 0.3 else arg for arg in node.args)


def of_operators(graph):
    (node,) = (n for n in graph.graph.nodes if "tanh" in str(n.target))
    node.target = torch.ops.aten.sin.default


def of_order(graph):
    layers = [n for n in graph.graph.nodes if "relu" in str(n.target)]
    layers[0].replace_all_uses_with(layers[0].args[0])


IN_GRAPHS = {
    "a number in the code": of_literals,
    "another operator": of_operators,
    "an operator less": of_order,
    "slots that changed places": lambda graph: changed(graph.b, swap),
    "a bias of other slots": lambda graph: changed(graph.b, swap, "bias"),
}


@pytest.mark.parametrize("fault", IN_GRAPHS)
@pytest.mark.one_in(3)
def test_a_fault_of_the_graph_is_found_and_nothing_handed_out(fault, monkeypatch):
    make = slice.dense_graphs

    def not_this_way(network):
        raise NotThisWay

    def faulty(*given):
        graphs = make(*given)
        with torch.no_grad():
            IN_GRAPHS[fault](graphs[""])
        graphs[""].recompile()
        return graphs

    model = gated()
    monkeypatch.setattr(export, "BY_PLAN", (not_this_way,))
    monkeypatch.setattr(slice, "dense_graphs", faulty)
    with pytest.raises(CertificateError, match="does not compute what the gated one does"):
        l0prune.export(model)


def test_a_fault_of_a_program_is_found(monkeypatch):
    small = l0prune.export(gated())
    make = small._made.make

    def faulty(*given):
        made, single = make(*given)
        with torch.no_grad():
            made.program.state_dict["b.weight"][0].mul_(1 + 1e-6)
        return made, single

    object.__setattr__(small._made, "make", faulty)
    with pytest.raises(CertificateError, match="does not compute what"):
        small.program  # noqa: B018


def weights(made, change):
    import onnx_ir

    value = max(made.graph.initializers.values(), key=lambda each: each.const_value.size)
    numbers = np.array(value.const_value.numpy())
    change(numbers)
    value.const_value = onnx_ir.tensor(numbers, name=value.name)


def scale_a_row(rows):
    rows[0] *= 1.01


def renamed(made, old, new):
    (node,) = (node for node in made.graph if node.op_type == old)
    node.op_type = new


IN_FILES = {
    "a row that is off by a hundredth": lambda made: weights(made, scale_a_row),
    "slots that changed places": lambda made: weights(made, swap),
    "another operator": lambda made: renamed(made, "Tanh", "Sin"),
    "a slope below zero": lambda made: renamed(made, "Relu", "LeakyRelu"),
}


@pytest.mark.parametrize("fault", IN_FILES)
@pytest.mark.one_in(4)
def test_a_fault_of_the_file_is_found_and_no_file_written(fault, monkeypatch, tmp_path):
    small, make = l0prune.export(gated()), file._exported

    def faulty(*given, **how):
        made = make(*given, **how)
        IN_FILES[fault](made)
        return made

    monkeypatch.setattr(file, "_exported", faulty)
    with pytest.raises(CertificateError, match="does not compute what the gated one does"):
        small.save_onnx(tmp_path / "m.onnx", time=False)
    assert not [*tmp_path.iterdir()]
