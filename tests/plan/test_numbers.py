"""Numbers that ask for more than there can be are refused in one sentence, before any work."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.recipes import files as recipe_files
from l0prune.plan.numbers import LARGE, check_number, check_whole, in_thousands, is_count, is_number
from l0prune.training.lambdas import Lambda
from l0prune.training.settings import Settings


@pytest.mark.parametrize("number", [0, -1, 10**18, 10**400, 1.0, math.nan, True, "3", None])
def test_a_whole_number_is_one_within_bounds(number):
    with pytest.raises(UsageError, match=r"^batch must be .* from 1 to 2,147,483,647, not"):
        check_whole("batch", number)
    check_whole("batch", 1)


@pytest.mark.parametrize("number", [-1e-9, math.nan, math.inf, 10**400, 1e300, True, "3", None])
def test_a_number_is_finite_and_within_bounds(number):
    with pytest.raises(UsageError, match=r"^rate must be a number from 0 to 1e\+12, not"):
        check_number("rate", number)
    assert not is_number(number)
    check_number("rate", 0)


def test_counts():
    assert is_count(0)
    assert not any(map(is_count, (-1, True, 1.0, 2**63, None)))


NAMES = [
    name for name, field in Settings.model_fields.items()
    if {int, float} & {field.annotation, *getattr(field.annotation, "__args__", ())}
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [10**18, -(10**18), 10**400])
def test_no_setting_takes_any_number(name, value):
    with pytest.raises(UsageError, match=name) as caught:
        Settings.of({name: value})
    assert len(str(caught.value)) < 500


def test_the_settings_with_numbers_are_these():
    assert {"epochs", "batch_size", "seed", "lr", "gate_lr", "recalibrate"} <= {*NAMES}


@pytest.mark.parametrize("text", ["1e300", "1e200*1e5", "10**18", "-1", "1e999", "9" * 400])
def test_no_price_is_endless(text):
    with pytest.raises(UsageError, match="λ ="):
        Lambda.of(text, 100)


@pytest.mark.parametrize(
    "override",
    ["seed=1000000000000000000", "gate.jitter=inf", "gate.seed=-1", "latency.threads=999999999",
     "latency.batch=1000000000000000000", "fit.batch_size=0", "finetune.epochs=1000000000000"],
)  # fmt: skip
def test_no_number_of_a_recipe_is_endless(override):
    section = override.partition(".")[0]
    more = ["fit.budget=macs=0.5"] if section == "fit" else []
    with pytest.raises(UsageError, match=override.partition("=")[0].rpartition(".")[2]):
        recipe_files.load("digits-lenet", [override, *more])


@pytest.mark.slow
def test_functions_refuse_what_no_machine_has():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4)
    for given in ({"seed": 10**30}, {"seed": -1}, {"jitter": math.inf}, {"jitter": 10**400}):
        with pytest.raises(UsageError, match=next(iter(given))):
            l0prune.gate(model, x, **given)
    l0prune.gate(model, x)
    for given in ({"threads": 10**18}, {"batch": 10**18}, {"samples": 10**18}, {"seed": 10**30}):
        with pytest.raises(UsageError, match=next(iter(given))):
            l0prune.measure(model, **given)
    with pytest.raises(UsageError, match="round_to"):
        l0prune.fit(model, "macs=0.5", round_to=10**18)
    with pytest.raises(UsageError, match="batch_size"):
        l0prune.evaluate(model, ([], [(x, torch.zeros(2).long())]), batch_size=10**18)
    with pytest.raises(UsageError, match="seed"):
        l0prune.score(model, "random", seed=10**30)


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        (0, "0"),
        (999.4, "999"),
        (999.6, "1 k"),
        (13_802, "13.8 k"),
        (-2e6, "-2 M"),
        (5e15, "5e+03 T"),
    ],
)
def test_large_amounts_are_said_in_thousands(amount, said):
    assert in_thousands(amount, LARGE) == said
