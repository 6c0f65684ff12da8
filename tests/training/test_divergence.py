import math

import pytest
import torch
from densities import divergence, expectation
from scipy.integrate import quad
from scipy.stats import norm
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.training.penalty import penalty

N = 50


def gated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    return l0prune.gate(model, torch.randn(2, 3).double(), open_probability=0.7, jitter=1.5)


def by_hand(gates, prior_of):
    """Σ KL over the gates of axes that have a prior, by numerical integration."""
    total = 0.0
    for axis in gates.axes:
        if (prior := prior_of(axis.name)) is not None:
            at = gates.gate.initial(prior)
            for log_alpha in gates.log_alpha.detach()[axis.slice].tolist():
                total += divergence(gates.gate, log_alpha, at)
    return total


@pytest.mark.parametrize("counting", ["joint", "groups"])
def test_penalty_of_eq_21_is_that_of_eq_22_and_the_divergence_of_the_gates(counting):
    model = gated()
    gates = l0prune.gates(model)
    plain = penalty(model, "0.1/N", n=N, counting=counting, l2=0.2).item()
    whole = penalty(model, "0.1/N", n=N, counting=counting, l2=0.2, prior=0.1).item()
    assert whole - plain == pytest.approx(by_hand(gates, lambda name: 0.1) / N, rel=1e-10)


def test_priors_per_axis():
    model = gated()
    gates = l0prune.gates(model)
    first, second = (axis.name for axis in gates.axes)
    for prior in ({first: 0.3, "*": 0.8}, {first: 0.3}, {}):
        expected = by_hand(gates, lambda name, p=prior: p.get(name, p.get("*")))
        value = penalty(model, 0.0, n=N, prior=prior).item()
        assert value == pytest.approx(expected / N, rel=1e-10)
    assert second != first


def test_the_whole_free_energy_of_a_spike_and_slab():
    """Eq. 20 for two gates with three weights each, by integration over gates and weights."""
    torch.manual_seed(1)
    model = nn.Linear(2, 3, bias=False).double()
    l0prune.gate(model, torch.randn(2, 2).double(), open_probability=0.5, jitter=1)
    gates = l0prune.gates(model)
    columns = model.state_dict()["weight"].T.tolist()
    tau, width, chance = 1.7, 0.05, 0.2  # of the slab, of the posterior relative to it; the prior

    def code_length(weight):
        """KL(q(θ|z ≠ 0)‖p(θ|z ≠ 0)) of Gaussians."""
        q, p = norm(weight, width * tau), norm(0, tau)
        ends = weight - 12 * width * tau, weight + 12 * width * tau
        return quad(lambda x: q.pdf(x) * (q.logpdf(x) - p.logpdf(x)), *ends, epsabs=1e-12)[0]

    nats = 0.0
    for log_alpha, column in zip(gates.log_alpha.tolist(), columns, strict=True):
        length = sum(map(code_length, column))
        nats += divergence(gates.gate, log_alpha, gates.gate.initial(chance))
        nats += expectation(lambda z, cost=length: cost * (z != 0), gates.gate, log_alpha)

    lam = f"(({width}**2 - 1)/2 - log({width}))/N"
    for counting in ("joint", "groups"):
        ours = penalty(model, lam, n=N, counting=counting, l2=1 / (N * tau**2), prior=chance)
        assert N * ours.item() == pytest.approx(nats, rel=1e-9)


def test_gradient_is_that_of_the_divergence():
    model = gated()
    log_alpha = l0prune.gates(model).log_alpha
    penalty(model, 0.0, n=1, prior=0.3).backward()
    at = torch.full_like(log_alpha, HardConcrete().initial(0.3))
    again = log_alpha.detach().clone().requires_grad_()
    HardConcrete().divergence(again, at).sum().backward()
    torch.testing.assert_close(log_alpha.grad, again.grad)


def test_without_data_the_gates_become_the_prior():
    model = gated()
    log_alpha = l0prune.gates(model).log_alpha
    optimizer = torch.optim.Adam([log_alpha], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        penalty(model, 0.0, n=1, prior=0.25).backward()
        optimizer.step()
    p = l0prune.gates(model).open_probability()
    torch.testing.assert_close(p, torch.full_like(p, 0.25), rtol=0, atol=1e-3)


def test_float32_gates_are_compared_in_float64():
    model = l0prune.gate(nn.Linear(5, 2), torch.randn(2, 5), open_probability=0.1, jitter=1e-4)
    gates = l0prune.gates(model)
    value = penalty(model, 0.0, n=1, prior=0.1)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(by_hand(gates, lambda name: 0.1), rel=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert penalty(model, 0.0, n=1, prior=0.1).item() == value.item()


def test_wrong_use():
    model = gated()
    with pytest.raises(UsageError, match="prior needs n"):
        penalty(model, 0.1, prior=0.1)
    for nonsense in (0, 1, -0.1, math.nan, "0.1", [0.1], {"*": 2}):
        with pytest.raises(UsageError, match="prior is the probability"):
            penalty(model, 0.1, n=N, prior=nonsense)
    with pytest.raises(UsageError, match=r"prior is given for 'nowhere'"):
        penalty(model, 0.1, n=N, prior={"nowhere": 0.1})


def test_a_gate_without_a_divergence_says_so():
    class Step:
        name = "step"

        def sample(self, log_alpha, noise):
            return (log_alpha > 0).to(log_alpha)

        def estimate(self, log_alpha):
            return (log_alpha > 0).to(log_alpha)

        def open_probability(self, log_alpha):
            return torch.sigmoid(log_alpha)

        def initial(self, open_probability):
            return 1.0

        def at(self, progress):
            return self

    model = l0prune.gate(nn.Linear(5, 2), torch.randn(2, 5), gate=Step())
    with pytest.raises(UsageError, match=r"step gates is not"):
        penalty(model, 0.1, n=N, prior=0.1)
