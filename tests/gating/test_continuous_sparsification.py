import math

import pytest
import torch
from densities import numbers
from hypothesis import given
from hypothesis import strategies as st

from l0prune.errors import UsageError
from l0prune.gating.kinds.base import gate_from_dict, gate_to_dict
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification


@given(st.floats(0, 1), st.floats(-20, 20))
def test_beta_rises_geometrically_from_1_to_200(progress, s):
    beta = 200**progress
    gate = ContinuousSparsification().at(progress)
    soft = 1 / (1 + math.exp(-beta * s)) if beta * s > -700 else 0.0
    assert gate.sample(numbers(s), numbers(0.3)).item() == pytest.approx(soft, rel=1e-9, abs=1e-300)
    assert gate.open_probability(numbers(s)).item() == pytest.approx(soft, rel=1e-9, abs=1e-300)


def test_annealing_depends_on_the_progress_alone():
    gate = ContinuousSparsification(beta=2, final_beta=50)
    assert gate.at(1).at(0.25).at(0.5) == gate.at(0.5)
    assert gate.at(0.0) == gate
    betas = [gate.at(p).sample(numbers(1e-3), numbers(0.5)).logit().item() * 1e3 for p in (0, 1)]
    assert betas == pytest.approx([2, 50])
    middle = gate.at(0.5).sample(numbers(1e-3), numbers(0.5)).logit().item() * 1e3
    assert middle == pytest.approx(math.sqrt(2 * 50))


def test_eval_mode_is_the_step_and_the_soft_mask_comes_to_it():
    s = numbers(-3.0, -0.1, 0.0, 0.1, 3.0)
    gate = ContinuousSparsification()
    for progress in (0, 0.5, 1):
        assert gate.at(progress).estimate(s).tolist() == [0, 0, 0, 1, 1]
    soft = gate.at(1).sample(s, s)
    assert soft.tolist() == pytest.approx([0, 0, 0.5, 1, 1], abs=1e-8)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_formula(progress):
    s = torch.linspace(-2, 2, 101, dtype=torch.float64).requires_grad_()
    weights = torch.randn(101, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, beta = ContinuousSparsification().at(progress), 200**progress
    for ours in (gate.sample(s, s), gate.open_probability(s)):
        (got,) = torch.autograd.grad(ours @ weights, s)
        (wanted,) = torch.autograd.grad((1 / (1 + (-beta * s).exp())) @ weights, s)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0, 1))
def test_initial_is_at_the_temperature_of_now(p, progress):
    gate = ContinuousSparsification().at(progress)
    assert gate.open_probability(numbers(gate.initial(p))).item() == pytest.approx(p, rel=1e-9)


def test_where_it_stands_travels_with_the_model():
    gate = ContinuousSparsification(final_beta=100).at(0.3)
    assert gate_from_dict(gate_to_dict(gate)) == gate


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0},
        {"beta": math.nan},
        {"beta": 10, "final_beta": 5},
        {"final_beta": math.inf},
        {"progress": -0.1},
        {"progress": 1.5},
        {"progress": math.nan},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UsageError):
        ContinuousSparsification(**settings)
