"""Cost of gates that follow the input.

For an input x let s(x) be the share of the network's MACs that its open gates leave. The gates'
cost is the mean over a batch of the expectation of s over the gates' noise, times a price, or

    μ·(E[s] − target),    μ ≥ 0,

with a multiplier that rises while E[s] is above the target and falls while it is below.
Batch-shaping (Bejnordi et al. 2020, arXiv 1907.06627) adds Σᵢ (F(p₍ᵢ₎) − i/(n+1))²/n for every
gate, where p₍₁₎ ≤ … ≤ p₍ₙ₎ are its chances to be open for the n examples of a batch and F is the
distribution function of Beta(0.6, 0.4): so that a gate is open for some inputs and closed for
others. F is that of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce

import numpy as np
import torch
from torch import Tensor

from l0prune.features.input_gates.gate import InputGate

_PRIOR = (0.6, 0.4)
_STEPS = 2048  # of the table of its distribution function


def means_of(gate: InputGate) -> list[Tensor]:
    """Return the open share of each axis and, last, of the block, by example or position."""
    return [chance.mean(-1) for chance in gate.chances]


def share_of(axes: Sequence[int], means: Sequence[Tensor], skips: bool) -> Tensor:
    """Return the share of a layer's MACs that open gates on its axes leave, by example.

    Exact, since gates are independent given the input; for a layer with one axis twice, up to the
    variance of the share that is open.
    """
    own = [means[axis] for axis in axes]
    return reduce(torch.mul, [*own, means[-1]] if skips else own)


def shaping(gates: Iterable[InputGate]) -> Tensor:
    """Return the mean batch-shaping loss of all gates; see the module's docstring."""
    found = []
    for gate in gates:
        for chances in gate.chances:
            p = chances.flatten(0, -2).sort(dim=0).values
            n = len(p)
            at = torch.arange(1, n + 1, device=p.device, dtype=p.dtype) / (n + 1)
            found.append((_prior_cdf(p) - at[:, None]).square().mean(0))
    return torch.cat(found).mean()


@cache
def _table() -> Tensor:
    """Return the distribution function of Beta(0.6, 0.4) at equal steps of t, with x = sin²t.

    With x = sin²t the density a x^(a−1)(1−x)^(b−1) dx is 2 sin^(2a−1) t cos^(2b−1) t dt, which the
    first and last steps, where it has poles, take by its integral's leading term.
    """
    a, b = _PRIOR
    t = np.linspace(0, np.pi / 2, _STEPS + 1)
    middle = (t[1:] + t[:-1]) / 2
    pieces = 2 * np.sin(middle) ** (2 * a - 1) * np.cos(middle) ** (2 * b - 1) * np.diff(t)
    pieces[0] = t[1] ** (2 * a) / a
    pieces[-1] = (t[-1] - t[-2]) ** (2 * b) / b
    whole = np.concatenate([[0.0], pieces.cumsum()])
    return torch.from_numpy(whole / whole[-1])


def _prior_cdf(p: Tensor) -> Tensor:
    """Return F of probabilities by linear interpolation in the table; differentiable."""
    table = _table().to(p)
    place = p.clamp(1e-6, 1 - 1e-6).sqrt().asin() * (2 / torch.pi * _STEPS)
    low = place.detach().floor().clamp(max=_STEPS - 1).long()
    return table[low] + (place - low) * (table[low + 1] - table[low])
