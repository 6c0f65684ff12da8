import math

import pytest
import torch
from densities import numbers
from hypothesis import given
from hypothesis import strategies as st

from l0prune.errors import UsageError
from l0prune.gating.kinds.binary_concrete import BinaryConcrete

GATES = [BinaryConcrete(), BinaryConcrete(beta=0.2)]


@pytest.mark.parametrize("gate", GATES)
@given(st.floats(-20, 20), st.floats(1e-7, 1 - 1e-7))
def test_sample_is_the_formula(gate, log_alpha, u):
    logit = (math.log(u) - math.log1p(-u) + log_alpha) / gate.beta
    z = 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
    sampled = gate.sample(numbers(log_alpha), numbers(u)).item()
    assert sampled == pytest.approx(z, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log_alpha", [-3.0, -1.0, 0.0, 2.0])
def test_samples_are_distributed_as_the_closed_form(gate, log_alpha):
    """P(z ≤ x) = σ(β·logit x − log α) (Maddison et al., eq. 11); at ½ it is the coin's."""
    count = 200_000
    u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = gate.sample(numbers(log_alpha).expand(count), u.clamp(1e-12))
    for x in (0.1, 0.5, 0.9):
        p = 1 / (1 + math.exp(log_alpha - gate.beta * math.log(x / (1 - x))))
        assert abs((z <= x).double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / count)
    p = gate.open_probability(numbers(log_alpha)).item()
    assert p == pytest.approx(1 / (1 + math.exp(-log_alpha)))
    assert abs((z > 0.5).double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_is_that_of_the_formula(gate):
    generator = torch.Generator().manual_seed(0)
    log_alpha = torch.randn(500, dtype=torch.float64, generator=generator).mul(3).requires_grad_()
    u = torch.rand(500, dtype=torch.float64, generator=generator).clamp(1e-9, 1 - 1e-9)
    weights = torch.randn(500, dtype=torch.float64, generator=generator)
    naive = 1 / (1 + (-(u.log() - (1 - u).log() + log_alpha) / gate.beta).exp())
    (got,) = torch.autograd.grad(gate.sample(log_alpha, u) @ weights, log_alpha)
    (wanted,) = torch.autograd.grad(naive @ weights, log_alpha)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_eval_mode_is_the_more_likely_side():
    gate = BinaryConcrete()
    assert gate.estimate(numbers(-3, -1e-9, 0, 1e-9, 3)).tolist() == [0, 0, 0, 1, 1]
    assert gate.estimate(numbers(gate.initial(0.49), gate.initial(0.51))).tolist() == [0, 1]


def test_it_is_the_same_all_through_training():
    gate = BinaryConcrete(beta=0.3)
    assert gate.at(0.7) is gate


@pytest.mark.parametrize("beta", [0, -1, math.nan, math.inf])
def test_a_temperature_out_of_range_is_refused(beta):
    with pytest.raises(UsageError, match="beta"):
        BinaryConcrete(beta=beta)
