"""Networks on which pruners go wrong: here each is surveyed, and what is cut is cut exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from deadness import randomise
from differences import ROUNDED, difference, graph_difference, in_float64
from networks import CASES as ELSEWHERE
from networks import IMAGE, Fn, conv
from small_networks import AXES, CASES, REASONS

import l0prune
from l0prune.errors import CaptureError, NothingToPrune


def made(name):
    torch.manual_seed(0)
    module, example = CASES[name]()
    return randomise(module).eval(), example


def elsewhere(name):
    torch.manual_seed(0)
    module, shape, _ = ELSEWHERE[name]
    return randomise(copy.deepcopy(module)).eval(), (torch.randn(shape),)


@pytest.mark.parametrize("name", AXES)
@pytest.mark.one_in(3)
def test_axes_are_those_one_expects(name):
    module, example = made(name)
    found = l0prune.survey(module, example, own_class=False)
    assert sorted(axis.size for axis in found.axes) == sorted(AXES[name])


# By default those of which tests/exporting/test_export.py does not show it.
EXPORTED = [pytest.param(n, marks=pytest.mark.slow if n in ELSEWHERE else ()) for n in CASES]


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.one_in(10)
def test_export_is_exact(name):
    module, example = made(name)
    if name in REASONS:
        with pytest.raises(NothingToPrune, match=REASONS[name]):
            l0prune.gate(module, example)
        return
    dense = cut(module, example)
    assert difference(module, dense, example) <= ROUNDED
    assert graph_difference(module, dense, example) <= ROUNDED
    assert dense.params < dense.params_before


@pytest.mark.parametrize("name", [name for name in {**ELSEWHERE, **CASES} if name not in REASONS])
@pytest.mark.one_in(50)
def test_closed_branches_and_closed_slots_together_are_exact(name):
    if name == "with_a_tangent" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 does not export a jvp")
    module, example = in_float64(*(made(name) if name in CASES else elsewhere(name)))
    l0prune.gate(module, example)
    bank = l0prune.gates(module)
    branches = [axis.slice.start for axis in bank.axes if axis.kind == "branch"]
    for gone in {(), *((place,) for place in branches), tuple(branches)}:
        generator = torch.Generator().manual_seed(len(gone) + sum(gone))
        with torch.no_grad():
            bank.log_alpha.uniform_(-1.0, 2.5, generator=generator)
            bank.log_alpha[torch.rand(bank.plan.size, generator=generator) < 0.3] = -5.0
            bank.log_alpha[branches] = 3.0
            bank.log_alpha[list(gone)] = -5.0
        small = l0prune.export(module)
        assert len(small.gone) >= len(gone)
        assert difference(module, small, example) <= 1e-10
        assert graph_difference(module, small, example) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in REASONS])
def test_export_is_exact_in_float64(name):
    module, example = in_float64(*made(name))
    assert difference(module, cut(module, example), example) <= 1e-10


def cut(module, example):
    l0prune.gate(module, example)
    bank = l0prune.gates(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        bank.log_alpha.uniform_(-1.5, 2.5, generator=generator)
        bank.log_alpha[torch.rand(bank.plan.size, generator=generator) < 0.5] = -5.0
    return l0prune.export(module)


def test_an_output_that_torch_cannot_take_apart_is_named():
    class Own:
        def __init__(self, tensor):
            self.tensor = tensor

    with pytest.raises(CaptureError, match=r"Own.*register a pytree"):
        l0prune.survey(Fn(lambda m, x: Own(m.a(x)), a=conv(3, 8)), (torch.randn(IMAGE),))
