"""What is no module that anybody can look into, or has nothing to export, is refused in words."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, QuantStub
from torchao.quantization.pt2e import MinMaxObserver as Torchaos

import l0prune
from l0prune.capture.model_checks import same_draws, warn_of_nan
from l0prune.errors import L0pruneWarning, UsageError


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("act", [l0prune.survey, l0prune.gate])
def test_what_unflatten_made_is_refused(act, inside):
    x = torch.randn(2, 4)
    made = torch.export.unflatten(torch.export.export(plain(), (x,)))
    with pytest.raises(UsageError, match=r"torch\.export\.unflatten"):
        act(nn.Sequential(made, nn.ReLU()) if inside else made, x)


def test_a_model_without_values_is_gated_and_not_exported():
    with torch.device("meta"):
        model, x = plain(), torch.randn(2, 4)
    l0prune.gate(model, x)
    with pytest.raises(UsageError, match=r"0\.weight is on the meta device.*load_state_dict"):
        l0prune.export(model)
    real = l0prune.gate(plain(), torch.randn(2, 4))
    assert real.state_dict().keys() == model.state_dict().keys()
    assert l0prune.export(real).certificate.checks


def test_weights_in_float8_are_looked_at():
    model = plain()
    model.scale = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    warn_of_nan(model)
    model.scale.data = torch.full((3,), float("nan")).to(torch.float8_e4m3fn)
    with pytest.warns(L0pruneWarning, match="NaN or infinite numbers: scale"):
        warn_of_nan(model)


@pytest.mark.parametrize("name", ["meta", "graph", "print_readable"])
def test_names_that_graphs_of_torch_need_are_refused_before_the_training(name):
    model = plain()
    model.add_module(name, nn.Linear(2, 3))
    with pytest.raises(RuntimeError, match="nonexistent attribute"):  # else nothing to refuse
        torch.export.export(model, (torch.randn(2, 4),)).module()
    with pytest.raises(UsageError, match=f"calls something '{name}'.*Rename that attribute"):
        l0prune.survey(model, torch.randn(2, 4))
    deeper = nn.Sequential(model, nn.Linear(3, 2))
    assert l0prune.export(l0prune.gate(deeper, torch.randn(2, 4))).program is not None


def test_finite_parameters_whose_sum_overflows_are_no_cause_for_a_warning(recwarn):
    model = nn.Linear(2, 2).half()
    with torch.no_grad():
        model.weight.fill_(6e4)
    warn_of_nan(model)
    assert not recwarn.list


def test_parameters_of_nan_are_named():
    model = plain()
    with torch.no_grad():
        model[0].weight[0] = float("inf")
    with pytest.warns(L0pruneWarning, match="NaN or infinite numbers: 0.weight"):
        l0prune.survey(model, torch.randn(2, 4))


@pytest.mark.parametrize(
    "made", [partial(FakeQuantize, MinMaxObserver, 0, 255), MinMaxObserver, Torchaos]
)
def test_what_is_prepared_for_quantization_is_refused(made):
    x = torch.randn(2, 4)
    prepared = nn.Sequential(nn.Linear(4, 8), made(), nn.Linear(8, 2)).eval()
    with pytest.raises(UsageError, match=r"\(1 rounds or observes.*See docs/howto/in-eight-bits"):
        l0prune.gate(prepared, x)
    stub = nn.Sequential(QuantStub(), *plain()).eval()  # does nothing before it is prepared
    assert l0prune.gates(l0prune.gate(stub, x)).plan.size == 12


@pytest.mark.parametrize("seed", [None, 0])
def test_random_numbers_of_every_generator_go_on_where_they_were(seed):
    def draw():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    model = nn.Linear(2, 2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    with suppress(RuntimeError), same_draws(model, seed):
        draw()
        raise RuntimeError
    assert draw() == expected
