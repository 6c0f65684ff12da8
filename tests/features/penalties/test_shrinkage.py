"""Each proximal operator against the least value on a grid."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from l0prune.errors import UsageError
from l0prune.features.penalties import shrinkage

GRID = np.linspace(0, 6, 20_001)
STEP = GRID[1]
# (t, τ, scale): small steps, large ones, and ones beyond what makes the problem convex.
CASES = [
    (t, tau, scale)
    for t in (0.0, 0.07, 0.4, 0.9, 1.3, 2.6, 3.4, 5.0)
    for tau, scale in ((1e-3, 1.0), (0.2, 0.5), (0.6, 1.0), (1.9, 0.4), (4.0, 1.0))
]


def penalties(scale, x=GRID):
    """p(x), by plain formulas."""
    scad = np.where(
        x <= scale,
        x,
        np.where(
            x <= 3.7 * scale,
            (2 * 3.7 * scale * x - x**2 - scale**2) / (2 * 2.7 * scale),
            (3.7 + 1) * scale / 2,
        ),
    )

    def mcp(a):
        return np.where(x <= a * scale, x - x**2 / (2 * a * scale), a * scale / 2)

    return {
        "group-lasso": x,
        "trimmed-l1": x,
        "group-lq": 2 * np.sqrt(scale * x),
        "scad": scad,
        "mcp": mcp(3.0),
        "firm": mcp(1.5),
        "l0-projection": scale * (x > 0),
    }


def found(kind, *cases):
    t, tau, scale = torch.tensor(cases, dtype=torch.float64).T
    return kind.shrunk(t, tau, scale)


@pytest.mark.parametrize("name", penalties(1.0))
def test_it_is_the_least_value_on_a_grid(name):
    kind = shrinkage.shrinkage_of(name)
    shrunk = found(kind, *CASES).tolist()
    for (t, tau, scale), x in zip(CASES, shrunk, strict=True):
        p = penalties(scale)[name]
        values = 0.5 * (GRID - t) ** 2 + tau * p
        mine = 0.5 * (x - t) ** 2 + tau * float(penalties(scale, x)[name])
        assert mine <= values.min() + 1e-8, (t, tau, scale)
        near = abs(x - GRID[values.argmin()]) <= 2 * STEP
        assert near or abs(values.min() - mine) < 1e-8, (t, tau, scale)  # two are as deep


@pytest.mark.parametrize(("tau", "scale"), [(0.05, 1.0), (0.6, 1.0), (0.3, 2.0)])
def test_q_shrinkage_is_the_least_value_with_its_own_penalty(tau, scale):
    """Its penalty has p′(x) = (t − x)/τ where x is what t is shrunk to."""
    kind = shrinkage.QShrinkage()
    t = torch.linspace(1e-3, 9, 400_001, dtype=torch.float64)
    x = kind.shrunk(t, torch.full_like(t, tau), torch.full_like(t, scale)).numpy()
    t = t.numpy()
    moves = x > 0
    x, slope = x[moves], ((t - x) / tau)[moves]
    p = np.interp(
        GRID, x, np.concatenate([[0], np.cumsum((slope[1:] + slope[:-1]) / 2 * np.diff(x))])
    )
    p += GRID.clip(max=x[0]) * slope[0] - p[0]
    for at in (0.1, 0.6, 1.0, 2.5, 5.0):
        (mine,) = found(kind, (at, tau, scale)).tolist()
        values = 0.5 * (GRID - at) ** 2 + tau * p
        assert 0.5 * (mine - at) ** 2 + tau * np.interp(mine, GRID, p) <= values.min() + 1e-4
        assert abs(mine - GRID[values.argmin()]) < 0.02


def test_half_thresholding_of_the_paper():
    """Xu et al. 2012: for (x − t)² + λ·√x, x = ⅔·t·(1 + cos(⅔·π − ⅔·arccos(λ/8·(t/3)^−1.5)))."""
    t, tau = np.array([1.2, 1.7, 4.0]), 0.3
    lam = 4 * tau  # of 2·√x, doubled
    wanted = 2 / 3 * t * (1 + np.cos(2 * np.pi / 3 - 2 / 3 * np.arccos(lam / 8 * (t / 3) ** -1.5)))
    mine = found(shrinkage.GroupLq(), *((each, tau, 1.0) for each in t))
    assert mine.tolist() == pytest.approx(wanted.tolist(), rel=1e-10)


@pytest.mark.parametrize("name", [*penalties(1.0), "q-shrinkage"])
def test_no_pull_leaves_groups_and_more_pull_never_makes_them_larger(name):
    kind = shrinkage.shrinkage_of(name)
    t = torch.linspace(0, 5, 50)
    ones, last = torch.ones(50), t
    torch.testing.assert_close(kind.shrunk(t, 0 * ones, ones), t)
    for tau in (0.01, 0.1, 0.5, 2.0, 50.0):
        now = kind.shrunk(t, tau * ones, ones)
        assert (now <= last + 1e-6).all()
        assert ((now >= 0) & (now <= t)).all()
        last = now
    assert not kind.shrunk(t, 50 * ones, ones).any()


def test_a_penalty_is_one_registered_class():
    @shrinkage.register
    @dataclass(frozen=True)
    class Ridge:
        name: ClassVar[str] = "ridge"

        def shrunk(self, t, tau, scale):
            return t / (1 + tau)

    assert isinstance(shrinkage.shrinkage_of("ridge"), shrinkage.Shrinkage)
    del shrinkage.PENALTIES["ridge"]
    assert shrinkage.shrinkage_of("group-mcp") == shrinkage.Mcp()
    with pytest.raises(UsageError, match=r"no penalty 'ridge'; there are group-lasso"):
        shrinkage.shrinkage_of("ridge")
