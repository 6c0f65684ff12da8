"""Rules, on small networks of every kind: the axes they find, and that closed slots are dead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from deadness import randomise, relative_effect_of_dead_slots
from models import Tied
from networks import Fn
from torch import nn
from zoo import TABLES

import l0prune


@pytest.fixture(scope="module")
def found(request):
    """The plan of a network, its axes as one expects them, and what dead slots still change."""
    if request.param == "with_a_tangent" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 does not export a jvp")
    module, shape, sizes = TABLES[request.param]
    plan, error = relative_effect_of_dead_slots(randomise(module), (torch.randn(shape),))
    return plan, sizes, error


def on(names):
    return pytest.mark.parametrize("found", names, indirect=True)


def test_activations_in_place_are_elementwise():
    """Some of them have no tag of torch 2.11."""
    kinds = nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.ReLU6, nn.SELU, nn.SiLU
    inside = [kind(inplace=True) for kind in kinds]
    plan = l0prune.survey(
        nn.Sequential(nn.Linear(4, 6), *inside, nn.LeakyReLU(), nn.Linear(6, 2)), torch.ones(2, 4)
    ).plan
    assert [axis.size for axis in plan.axes] == [6, 4]


@on(TABLES)
@pytest.mark.one_in(12)
def test_closed_slots_are_dead(found):
    assert found[2] <= 1e-12


@on([name for name, case in TABLES.items() if case[2]])
@pytest.mark.one_in(5)
def test_axes_found(found):
    plan, sizes, _ = found
    assert {axis.name.removeprefix("run."): axis.size for axis in plan.axes} == sizes


def test_tied_embedding_and_head_are_one_axis():
    plan, error = relative_effect_of_dead_slots(Tied(), (torch.randint(0, 20, (2, 5)),))
    assert [axis.size for axis in plan.axes] == [12]
    assert plan.aliases == {"head.weight": "embed.weight"}
    assert error <= 1e-12


def test_an_unknown_operator_pins_with_its_name():
    module = Fn(
        lambda m, x: m.b(torch.cdist(m.a(x), m.a(x))), a=nn.Linear(10, 8), b=nn.Linear(2, 3)
    )
    plan, error = relative_effect_of_dead_slots(module, (torch.randn(2, 10),))
    (pin,) = [pin for pin in plan.pins if pin.where == "a.weight dim 0"]
    assert "cdist" in pin.reason
    assert "unknown to l0prune" in pin.reason
    assert error <= 1e-12


def test_pins_name_the_users_line():
    module = Fn(lambda m, x: m.b(m.a(x).softmax(-1)), a=nn.Linear(10, 8), b=nn.Linear(8, 3))
    plan, _ = relative_effect_of_dead_slots(module, (torch.randn(2, 10),))
    (pin,) = [pin for pin in plan.pins if pin.where == "a.weight dim 0"]
    assert pin.source.startswith("networks.py:")


PINNED = {
    "layer_norm in the model's forward averages": lambda h: F.layer_norm(h + 1, (8,)),
    "a mean is taken": lambda h: h * (h + torch.arange(8.0)).mean(-1, keepdim=True),
    "rms_norm in the model's forward averages": lambda h: F.rms_norm(h + 1, (8,)),
    "a norm is taken": lambda h: F.normalize(h.exp(), dim=-1),
    "vector_norm reduces": lambda h: h * torch.linalg.vector_norm(h, -1, dim=-1, keepdim=True),
    "amax reduces": lambda h: h * h.abs().amax(-1, keepdim=True),
    "a mean is taken over it, and it is not zero": lambda h: (
        h * torch.cat([h, h.sigmoid()], -1).mean(-1, keepdim=True)
    ),
    "var goes over": lambda h: h * (h + torch.arange(8.0)).var(-1, keepdim=True),
    "var goes over it and over the batch": lambda h: h * h.var(),
    "median compares its slots": lambda h: h * h.median(-1, keepdim=True)[0],
    "kthvalue compares its slots": lambda h: h * h.kthvalue(2, -1, keepdim=True)[0],
    "sort compares its slots": lambda h: h * h.sort(-1)[0],
    "values decide which positions": lambda h: (
        h + h.scatter_add(1, torch.arange(16).view(2, 8) % 7, h)
    ),
    "a Fourier transform goes over it": lambda h: h * torch.fft.fft(h).real,
    "group_norm in the model's forward averages": lambda h: F.group_norm(h + 1, 1),
}


@pytest.mark.parametrize("words", PINNED)
@pytest.mark.one_in(3)
def test_an_average_that_closed_slots_would_move_pins_and_says_which(words):
    module = Fn(lambda m, x: m.b(PINNED[words](m.a(x))), a=nn.Linear(10, 8), b=nn.Linear(8, 3))
    plan, error = relative_effect_of_dead_slots(module, (torch.randn(2, 10),))
    assert [axis.size for axis in plan.axes] == [10]
    assert all(words in pin.reason for pin in plan.pins if "output" not in pin.reason)
    assert error <= 1e-12


def test_open_slots_matter():
    """The oracle is no rubber stamp: it notices when a live slot is called dead."""
    module = randomise(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)))
    x = torch.randn(2, 10)
    with torch.no_grad():
        before = module(x)
        module[0].bias += 1
        assert float((before - module(x)).abs().max()) > 1e-6


def test_a_one_hot_code_is_no_axis():
    module = Fn(
        lambda m, x: m.b(m.a(x)) + m.c(torch.nn.functional.one_hot(x.argmax(-1), 10).to(x.dtype)),
        a=nn.Linear(10, 8), b=nn.Linear(8, 3), c=nn.Linear(10, 3),
    )  # fmt: skip
    plan, error = relative_effect_of_dead_slots(randomise(module), (torch.randn(2, 10),))
    assert error <= 1e-12
    reasons = {pin.where: pin.reason for pin in plan.pins}
    assert reasons["c.weight dim 1"] == "it is a one-hot code"
