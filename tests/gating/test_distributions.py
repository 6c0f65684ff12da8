"""The hard concrete distribution against the paper's formulas, integrals and samples."""

import math

import pytest
import torch
from densities import below, density, divergence, expectation, log_density, numbers
from scipy.integrate import quad
from torch.distributions import Bernoulli, kl_divergence

import l0prune
from l0prune.gating.kinds.distributions import HardConcrete

SETTINGS = [(2 / 3, -0.1, 1.1), (0.3, -0.3, 1.2), (2.5, -0.02, 1.5), (1.0, -1e-6, 1 + 1e-6)]
LOG_ALPHAS = (-4.0, -0.7, 0.0, 1.3, 5.0)
CASES = [(settings, at) for settings in SETTINGS for at in LOG_ALPHAS]
every_case = pytest.mark.parametrize(("settings", "log_alpha"), CASES)


def made(settings, log_alpha):
    return HardConcrete(numbers(log_alpha), *map(numbers, settings))


@every_case
def test_masses_density_and_cdf_are_equations_23_to_26(settings, log_alpha):
    q, gate = made(settings, log_alpha), l0prune.HardConcrete(*settings)
    points = [0.0, 1e-9, 0.2, 0.5, 0.93, 1.0]
    found = q.log_prob(numbers(*points)).tolist()
    assert found == pytest.approx([log_density(z, gate, log_alpha) for z in points], rel=1e-9)
    assert q.mass_at_zero.item() == pytest.approx(below(0, gate, log_alpha), rel=1e-9)
    assert q.mass_at_one.item() == pytest.approx(1 - below(1, gate, log_alpha), rel=1e-7)
    inner = points[:-1]
    cumulated = [below(z, gate, log_alpha) for z in inner]
    assert q.cdf(numbers(*inner)).tolist() == pytest.approx(cumulated, rel=1e-9)
    assert q.cdf(numbers(1.0)).item() == 1
    between, _ = quad(lambda z: density(z, gate, log_alpha), 0, 1, epsabs=1e-13)
    assert (q.mass_at_zero + q.mass_at_one).item() + between == pytest.approx(1, abs=1e-9)


@every_case
def test_moments_and_entropy_are_the_integrals(settings, log_alpha):
    q, gate = made(settings, log_alpha), l0prune.HardConcrete(*settings)
    mean = expectation(lambda z: z, gate, log_alpha)
    assert q.mean.item() == pytest.approx(mean, rel=1e-9)
    variance = expectation(lambda z: (z - mean) ** 2, gate, log_alpha)
    assert q.variance.item() == pytest.approx(variance, rel=1e-8)
    surprise = expectation(lambda z: -log_density(z, gate, log_alpha), gate, log_alpha)
    assert q.entropy().item() == pytest.approx(surprise, rel=1e-8, abs=1e-10)


@every_case
def test_icdf_and_median_undo_the_cdf(settings, log_alpha):
    q = made(settings, log_alpha)
    inside = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    torch.testing.assert_close(q.icdf(q.cdf(inside)), inside, rtol=1e-6, atol=1e-9)
    assert q.icdf(numbers(0.0)).item() == 0
    assert q.icdf(numbers(1.0)).item() == 1
    median = q.median
    assert q.cdf(median).item() >= 0.5 - 1e-12
    assert median.item() == 0 or q.cdf(median - 1e-6).item() < 0.5
    gate = l0prune.HardConcrete(*settings, estimator="median")
    torch.testing.assert_close(median, gate.estimate(numbers(log_alpha)))


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_samples_have_these_moments_and_masses(settings):
    q, count = HardConcrete(torch.tensor([-1.0, 0.5]), *settings), 100_000
    z = q.sample((count,))
    assert z.shape == (count, 2)
    assert z.dtype == torch.float32
    deviation = q.stddev / math.sqrt(count)
    assert ((z.mean(0) - q.mean).abs() < 5 * deviation).all()
    for often, p in (((z == 0), q.mass_at_zero), ((z == 1), q.mass_at_one)):
        assert ((often.double().mean(0) - p).abs() < 5 * (p * (1 - p) / count).sqrt()).all()
    for point in (0.0, 0.3, 0.8):
        p = q.cdf(torch.tensor(point))
        often = (z <= point).double().mean(0)
        assert ((often - p).abs() < 5 * (p * (1 - p) / count).sqrt()).all()


def test_a_sample_is_that_of_the_gate():
    torch.manual_seed(3)
    q = HardConcrete(torch.linspace(-3, 3, 50, dtype=torch.float64), 0.5, -0.2, 1.3)
    z = q.sample()
    torch.manual_seed(3)
    epsilon = torch.finfo(torch.float64).eps
    noise = torch.empty(50, dtype=torch.float64).uniform_(epsilon, 1 - epsilon)
    torch.testing.assert_close(z, l0prune.HardConcrete(0.5, -0.2, 1.3).sample(q.log_alpha, noise))


def test_gradients_of_all_parameters_are_those_of_finite_differences():
    given = [numbers(0.4, -1), numbers(0.7), numbers(-0.1), numbers(1.2)]

    def values(*parameters):
        torch.manual_seed(1)
        q = HardConcrete(*parameters)
        p = HardConcrete(numbers(0.1), *parameters[1:])
        other = HardConcrete(numbers(0.1), 0.9)
        found = [q.rsample((3,)).sum(0), q.mean, q.variance, q.entropy(), q.cdf(numbers(0.3))]
        found += [q.log_prob(numbers(0.0, 0.6)), kl_divergence(q, p), kl_divergence(q, other)]
        return torch.stack(found)

    assert torch.autograd.gradcheck(values, [each.requires_grad_() for each in given])


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_divergence_in_closed_form_is_the_integral(settings):
    gate = l0prune.HardConcrete(*settings)
    for one, other in ((0.3, -1.0), (-2.0, 2.0), (0.5, 0.5)):
        found = kl_divergence(made(settings, one), made(settings, other)).item()
        assert found == pytest.approx(divergence(gate, one, other), rel=1e-9, abs=1e-13)


def test_divergence_of_other_temperatures_is_the_integral():
    q, p = made(SETTINGS[0], 0.4), made(SETTINGS[1], -0.3)
    of_q, of_p = (l0prune.HardConcrete(*settings) for settings in SETTINGS[:2])

    def ratio(z):
        return log_density(z, of_q, 0.4) - log_density(z, of_p, -0.3)

    assert kl_divergence(q, p).item() == pytest.approx(expectation(ratio, of_q, 0.4), rel=1e-9)
    nearly = HardConcrete(numbers(-0.3), numbers(2 / 3 + 1e-9))
    closed = kl_divergence(q, HardConcrete(numbers(-0.3), numbers(2 / 3)))
    torch.testing.assert_close(kl_divergence(q, nearly), closed, rtol=1e-7, atol=0)


def test_it_is_a_distribution_like_others():
    q = HardConcrete(torch.zeros(3, 1), torch.tensor([0.5, 0.7]))
    assert q.batch_shape == (3, 2)
    wide = q.expand((4, 3, 2))
    assert wide.rsample((5,)).shape == (5, 4, 3, 2)
    assert torch.equal(wide.mean[2], q.mean)
    assert "HardConcrete(log_alpha" in repr(q)
    with pytest.raises(NotImplementedError):
        kl_divergence(q, Bernoulli(0.5))


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"beta": 0.0}, "beta"), ({"gamma": 0.0}, "gamma"), ({"zeta": 1.0}, "zeta")],
)
def test_parameters_out_of_range_are_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        HardConcrete(0.0, **settings, validate_args=True)
    q = HardConcrete(torch.zeros(1), validate_args=True)
    for method, value in ((q.log_prob, 1.5), (q.cdf, -0.1), (q.icdf, 2.0)):
        with pytest.raises(ValueError):
            method(torch.tensor(value))
