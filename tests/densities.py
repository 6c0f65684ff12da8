"""The hard concrete distribution from the paper's formulas (eq. 23-26), by plain floats."""

import math

import torch
from scipy.integrate import quad


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def density(x, gate, log_alpha):
    """q(s̄) of eq. 23 and 25."""
    stretch = gate.zeta - gate.gamma
    s, alpha, beta = (x - gate.gamma) / stretch, math.exp(log_alpha), gate.beta
    above = beta * alpha * (s * (1 - s)) ** (-beta - 1)
    return above / (alpha * s**-beta + (1 - s) ** -beta) ** 2 / stretch


def below(x, gate, log_alpha):
    """Q(s̄) of eq. 24 and 25."""
    s = (x - gate.gamma) / (gate.zeta - gate.gamma)
    return 1 / (1 + math.exp(log_alpha - gate.beta * (math.log(s) - math.log1p(-s))))


def log_density(z, gate, log_alpha):
    """log q(z) of eq. 26: of the atoms at 0 and 1, and of the density between them."""
    if z == 0:
        return math.log(below(0, gate, log_alpha))
    if z == 1:
        return math.log1p(-below(1, gate, log_alpha))
    return math.log(density(z, gate, log_alpha))


def expectation(value, gate, log_alpha):
    """E of ``value(z)`` under eq. 26, by numerical integration."""
    between, _ = quad(
        lambda z: density(z, gate, log_alpha) * value(z), 0, 1, epsabs=1e-13, epsrel=1e-12
    )
    atoms = below(0, gate, log_alpha) * value(0)
    return atoms + (1 - below(1, gate, log_alpha)) * value(1) + between


def divergence(gate, log_alpha, prior):
    """KL(q(z)‖p(z)) from its definition."""

    def ratio(z):
        return log_density(z, gate, log_alpha) - log_density(z, gate, prior)

    return expectation(ratio, gate, log_alpha)
