import math

import pytest
import torch
from densities import divergence, log_density, numbers
from hypothesis import given
from hypothesis import strategies as st

from l0prune.errors import UsageError
from l0prune.gating.kinds.base import gate_from_dict, gate_to_dict
from l0prune.gating.kinds.hard_concrete import HardConcrete

GATES = [HardConcrete(), HardConcrete(estimator="median"), HardConcrete(0.5, -0.3, 1.2, "median")]
log_alphas = st.floats(-30, 30)
uniforms = st.floats(1e-7, 1 - 1e-7)


def stretched(logit: float, gate: HardConcrete) -> float:
    """Eq. 11 and 12 by plain floats."""
    s = 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
    return min(1.0, max(0.0, s * (gate.zeta - gate.gamma) + gate.gamma))


@pytest.mark.parametrize("gate", GATES)
@given(log_alphas, uniforms)
def test_sample_is_equation_10_to_12(gate, log_alpha, u):
    z = gate.sample(numbers(log_alpha), numbers(u)).item()
    logit = (math.log(u) - math.log1p(-u) + log_alpha) / gate.beta
    assert z == pytest.approx(stretched(logit, gate), rel=1e-9, abs=1e-12)


@given(log_alphas)
def test_estimates_are_equation_13_and_the_median(log_alpha):
    paper, median = HardConcrete(), HardConcrete(estimator="median")
    estimate = paper.estimate(numbers(log_alpha)).item()
    assert estimate == pytest.approx(stretched(log_alpha, paper), rel=1e-12, abs=1e-14)
    middle = median.sample(numbers(log_alpha), numbers(0.5)).item()
    assert median.estimate(numbers(log_alpha)).item() == pytest.approx(middle, abs=1e-15)


def test_the_estimators_close_a_gate_where_the_paper_and_the_median_do():
    gate, median = HardConcrete(), HardConcrete(estimator="median")
    for which, threshold, probability in [
        (gate, -math.log(11), 1 / (1 + 11 ** (1 / 3))),  # P = σ(−log 11·(1 − 2/3))
        (median, -math.log(11) * 2 / 3, 0.5),
    ]:
        below, above = numbers(threshold - 1e-9), numbers(threshold + 1e-9)
        assert which.estimate(below).item() == 0
        assert which.estimate(above).item() > 0
        assert which.open_probability(above).item() == pytest.approx(probability, abs=1e-8)


@pytest.mark.parametrize("gate", GATES)
def test_gradients_are_those_of_the_formula(gate):
    generator = torch.Generator().manual_seed(0)
    log_alpha = torch.randn(500, dtype=torch.float64, generator=generator).mul(3).requires_grad_()
    u = torch.rand(500, dtype=torch.float64, generator=generator).clamp(1e-9, 1 - 1e-9)
    weights = torch.randn(500, dtype=torch.float64, generator=generator)

    def naive(logits: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(logits) * (gate.zeta - gate.gamma) + gate.gamma).clamp(0, 1)

    rate = 1.0 if gate.estimator == "paper" else 1 / gate.beta
    for ours, theirs in [
        (gate.sample(log_alpha, u), naive((u.log() - (1 - u).log() + log_alpha) / gate.beta)),
        (gate.estimate(log_alpha), naive(log_alpha * rate)),
    ]:
        assert 0 < (ours == 0).sum() < 500
        assert 0 < (ours == 1).sum() < 500
        (got,) = torch.autograd.grad(ours @ weights, log_alpha)
        (wanted,) = torch.autograd.grad(theirs @ weights, log_alpha)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_open_probability_is_how_often_a_sample_is_not_zero(gate):
    count = 200_000
    u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for log_alpha in (-3.0, -1.0, 0.0, 2.0):
        often = (gate.sample(numbers(log_alpha).expand(count), u.clamp(1e-12)) > 0).double().mean()
        p = gate.open_probability(numbers(log_alpha)).item()
        assert abs(often.item() - p) < 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("log_alpha", "prior"),
    [(0, 0), (0, 1e-3), (0.3, 0.55), (1, -2), (-5, 3), (2.5, 2.3), (8, -8), (-8, 8), (-3, 12)],
)
def test_divergence_is_the_integral_over_the_density_of_eq_26(gate, log_alpha, prior):
    closed = gate.divergence(numbers(log_alpha), numbers(prior)).item()
    assert closed == pytest.approx(divergence(gate, log_alpha, prior), rel=1e-11, abs=1e-15)


@pytest.mark.parametrize(("log_alpha", "prior"), [(1.0, -2.0), (-1.5, 0.5), (0.2, 0.0)])
def test_divergence_is_the_mean_log_ratio_of_samples(log_alpha, prior):
    gate, count = HardConcrete(), 40_000
    u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    samples = gate.sample(numbers(log_alpha).expand(count), u.clamp(1e-12)).tolist()
    ratios = numbers(
        *(log_density(z, gate, log_alpha) - log_density(z, gate, prior) for z in samples)
    )
    closed = gate.divergence(numbers(log_alpha), numbers(prior)).item()
    assert abs(ratios.mean().item() - closed) < 5 * ratios.std().item() / math.sqrt(count)


@given(log_alphas, st.floats(-10, 10))
def test_divergence_is_positive_and_has_the_slope_of_its_values(log_alpha, prior):
    gate, at = HardConcrete(), numbers(log_alpha).requires_grad_()
    value = gate.divergence(at, numbers(prior))
    assert value.item() >= -1e-13
    (slope,) = torch.autograd.grad(value.sum(), at)
    step = 1e-4
    ends = [gate.divergence(numbers(log_alpha + s), numbers(prior)).item() for s in (-step, step)]
    assert slope.item() == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-5, abs=1e-8)


def test_divergence_is_least_and_flat_at_the_prior():
    at = numbers(-4, -0.3, 0, 2).requires_grad_()
    value = HardConcrete().divergence(at, at.detach().clone())
    assert value.tolist() == [0, 0, 0, 0]
    (slope,) = torch.autograd.grad(value.sum(), at)
    torch.testing.assert_close(slope, numbers(0, 0, 0, 0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("gate", GATES)
def test_divergence_of_a_certain_gate_is_the_surprise_of_the_prior(gate):
    at, prior = numbers(-1e4, -80, 80, 1e4).requires_grad_(), numbers(0.7, 0.7, 0.7, 0.7)
    value = gate.divergence(at, prior)
    wanted = [-log_density(z, gate, 0.7) for z in (0, 0, 1, 1)]
    assert value.tolist() == pytest.approx(wanted, rel=1e-12)
    (slope,) = torch.autograd.grad(value.sum(), at)
    assert slope.isfinite().all()


@given(st.floats(1e-6, 1 - 1e-6))
def test_initial_gives_the_open_probability_asked_for(p):
    for gate in GATES:
        assert gate.open_probability(numbers(gate.initial(p))).item() == pytest.approx(p, rel=1e-9)


def test_nearly_open_means_exactly_one_in_eval_mode():
    for gate in (HardConcrete(), HardConcrete(estimator="median")):
        assert gate.estimate(torch.tensor([gate.initial(0.99)])).item() == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0},
        {"beta": math.nan},
        {"gamma": 0.1},
        {"zeta": 1.0},
        {"zeta": math.inf},
        {"estimator": "mean"},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UsageError):
        HardConcrete(**settings)


def test_a_gate_survives_being_plain_data():
    for gate in GATES:
        assert gate_from_dict(gate_to_dict(gate)) == gate
