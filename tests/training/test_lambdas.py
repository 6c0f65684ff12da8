import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal

import l0prune
from l0prune.errors import UsageError
from l0prune.training.lambdas import Lambda
from l0prune.training.penalty import penalty

N = 60_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1/N", 0.1 / N),
        ("1e-3", 1e-3),
        ("0", 0.0),
        ("log(N)/(2*N)", math.log(N) / (2 * N)),
        ("bic", math.log(N) / (2 * N)),
        ("aic", 1 / N),
        ("2*aic", 2 / N),
        (" +N**-1 ", 1 / N),
        ("sqrt(N) - exp(0)", math.sqrt(N) - 1),
    ],
)
def test_values(text, value):
    lam = Lambda.of(text, N)
    assert not lam.rules
    assert lam.default == pytest.approx(value, rel=1e-15)
    assert lam.for_axes(["a", "b"]) == (lam.default, lam.default)


@pytest.mark.parametrize(
    ("text", "price"), [("aic", lambda n: 2.0), ("bic", math.log)], ids=["aic", "bic"]
)
def test_aic_and_bic_are_the_criteria_of_a_regression(text, price):
    """Akaike's 2k − 2·log L and Schwarz's k·log n − 2·log L are 2n·(mean loss + λ·E‖θ‖₀)."""
    n, generator = 40, torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    true = torch.tensor([1.0, 0.4, 0.0, 0.0], dtype=torch.float64)
    y = x @ true + torch.randn(n, dtype=torch.float64, generator=generator)
    model = nn.Linear(4, 1, bias=False).double()
    l0prune.gate(model, x[:2])
    parameter, gates = dict(model.named_parameters())["weight"], l0prune.gates(model)
    ours, theirs = {}, {}
    for chosen in itertools.product((False, True), repeat=4):
        mask = torch.tensor(chosen)
        fit = torch.zeros(4, dtype=torch.float64)
        fit[mask] = torch.linalg.lstsq(x[:, mask], y).solution
        with torch.no_grad():
            parameter.copy_(fit.unsqueeze(0))
            gates.log_alpha.copy_(torch.where(mask, 1e4, -1e4))
            mean = -Normal(model(x).squeeze(1), 1.0).log_prob(y).mean()
            ours[chosen] = 2 * n * float(mean + penalty(model, text, n=n))
        residual = float((y - x @ fit).square().sum())
        log_likelihood = -0.5 * residual - 0.5 * n * math.log(2 * math.pi)
        theirs[chosen] = price(n) * sum(chosen) - 2 * log_likelihood
    assert ours == pytest.approx(theirs, rel=1e-12)


@given(st.floats(0, 1e6), st.integers(1, 10**9))
def test_a_printed_number_reads_back(value, n):
    assert Lambda.of(repr(value)).default == value
    assert Lambda.of(f"{value!r}/N", n).default == value / n


def test_first_matching_glob_counts_wherever_the_default_stands():
    names = ["convs.0", "convs.1", "fc"]
    for text in ("convs.0=1/N, convs.*=10/N, 0.1/N", "0.1/N, convs.0=1/N, convs.*=10/N"):
        lam = Lambda.of(text, 10)
        assert lam.rules
        assert lam.for_axes(names) == (0.1, 1.0, 0.01)


def test_axes_that_nothing_names_are_free():
    assert Lambda.of("fc=2").for_axes(["conv", "fc"]) == (0.0, 2.0)


def test_from_numbers_and_mappings():
    assert Lambda.of(0.5) == Lambda(0.5)
    assert Lambda.of(Lambda(0.5)) == Lambda(0.5)
    assert Lambda.of({"conv*": "1/N", "*": 3}, 4).for_axes(["conv", "fc"]) == (0.25, 3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1/N", "negative"),
        ("fc=-1", "negative"),
        ("", "cannot read"),
        ("0.1/", "cannot read"),
        ("0.1/n", "cannot read 'n'"),
        ("__import__('os').system('true')", "cannot read"),
        ("N.real", "cannot read"),
        ("log(N, 2)", "cannot read"),
        ("log(-N)", "no value"),
        ("1/0", "no value"),
        ("9**9**9", "no value"),
        ("(-1)**0.5", "cannot be|complex|is "),
        ("1e999", "inf"),
        ("True", "cannot read"),
        ("1, 2", "2 values"),
        ("=1", "nothing in front"),
        ("(" * 500, "cannot read"),
        ("-" * 100_000 + "1", "cannot read"),
    ],
)
def test_nonsense_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        Lambda.of(text, N)


def test_n_must_be_known_and_positive():
    with pytest.raises(UsageError, match="needs N, the number"):
        Lambda.of("0.1/N")
    with pytest.raises(UsageError, match="N ≥ 1"):
        Lambda.of("0.1/N", 0)


def test_a_glob_that_matches_nothing_is_a_mistake():
    with pytest.raises(UsageError, match=r"'cnov\*'.*conv1, fc"):
        Lambda.of("cnov*=1").for_axes(["conv1", "fc"])
