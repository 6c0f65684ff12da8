import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.plan.limits import Limit, bounds, limits


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("macs=0.5", [("macs", 0.5, "*")]),
        ("params=50%", [("params", 0.5, "*")]),
        ("params=.1", [("params", 0.1, "*")]),
        ("params=10k", [("params", 10_000, "*")]),
        ("macs=1.5G", [("macs", 1.5e9, "*")]),
        ("params=2500", [("params", 2500, "*")]),
        ("macs = 0.5, params=0.1", [("macs", 0.5, "*"), ("params", 0.1, "*")]),
        ("layer3.*: params=0.3", [("params", 0.3, "layer3.*")]),
        ({"macs": 0.5, "fc1: params": "3k"}, [("macs", 0.5, "*"), ("params", 3000, "fc1")]),
        (["macs=0.5", "params=0.1"], [("macs", 0.5, "*"), ("params", 0.1, "*")]),
        (Limit("macs", 0.25), [("macs", 0.25, "*")]),
        ("0: width=0.5, 1: width=3", [("width", 0.5, "0"), ("width", 3, "1")]),
        ("heads=1, 0: width=1", [("heads", 1, "*"), ("width", 1, "0")]),
        ("latency=12ms", [("latency", 12, "*")]),
        ("latency = 900 us", [("latency", 0.9, "*")]),
        ("latency=0.5s, macs=0.5", [("latency", 500, "*"), ("macs", 0.5, "*")]),
        ("conv*: latency=0.3", [("latency", 0.3, "conv*")]),
    ],
)
def test_what_a_budget_says(given, expected):
    assert [(x.measure, x.amount, x.glob) for x in limits(given)] == expected


@pytest.mark.parametrize(
    "text",
    ["macs=0.5", "layer3.*: params=0.3", "params=10000", "latency=12ms", "latency=0.5",
     "latency=0.5ms", "layer3.*: latency=1.5ms", "0: width=3", "0: width=1"],
)  # fmt: skip
def test_a_limit_is_written_as_it_is_read(text):
    (limit,) = limits(text)
    assert str(limit) == text
    assert limits(str(limit)) == (limit,)


@pytest.mark.parametrize("all_slots", ["width=100%", "width=1.0"])
def test_a_width_of_one_is_one_slot_and_one_of_100_percent_all(all_slots):
    model = l0prune.gate(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.ones(2, 4)
    )
    plan = l0prune.gates(model).plan
    assert [bound.most for bound in bounds(plan, limits("width=1"))] == [1, 1]
    sizes = [axis.size for axis in plan.axes]
    assert [bound.most for bound in bounds(plan, limits(all_slots))] == sizes


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "cannot read"), ("macs", "cannot read"), ("macs=half", "half"), ("time=0.5", "time"),
        ("macs=0", "more than 0"), ("macs=-0.5", "cannot read"), ("macs=120%", "whole network"),
        ("macs=0.5%", "macs=0.5 or macs=50%; else macs=0.005"),
        ("macs=1.5", "neither a share"),
        (": macs=0.5", "cannot read"), ("macs=0.5, macs=0.4", "twice"), ([], "empty"),
        ("width=3k", "none of its units"),
        ("latency=12", "of what"), ("latency=12MB", "none of its units"), ("macs=12ms", "units"),
        ("params=0.005k", "fewer than a network has"), ("latency=0ms", "more than 0"),
        (0.5, "float is no budget"), ("macs=nan", "nan"), ("macs=1e999", "more than 0"),
    ],
)  # fmt: skip
def test_what_says_nothing_is_refused(given, why):
    with pytest.raises(UsageError, match=why):
        limits(given)


def test_a_count_is_a_share_of_its_own_dense_count():
    assert Limit("params", 500.0).share(2000) == 0.25
    assert Limit("params", 0.25).share(2000) == 0.25
    assert Limit("params", 0.25).most(2000) == Limit("params", 500.0).most(2000) == 500


def test_an_amount_with_its_unit_is_no_share():
    (absolute,), (share,) = limits("latency=0.5ms"), limits("latency=0.5")
    assert (absolute.is_share, share.is_share) == (False, True)
    assert absolute.most(20.0) == 0.5
    assert share.most(20.0) == 10.0


def test_times_as_fast_are_a_share_of_the_milliseconds():
    assert limits("speed=2") == limits("latency=0.5")
    assert limits({"speed": "4x"}) == limits("latency=25%")
    assert str(limits("speed=2.5")[0]) == "speed=2.5"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("speed=1", "no faster than the one that came in"),
        ("speed=0.5", "no faster than the one that came in"),
        ("speed=50%", "speed=2 is twice as fast"),
        ("speed=2ms", "speed=2 is twice as fast"),
        ("layer3.*: speed=2", "the whole network"),
        ("speed=2, latency=0.3", "twice"),
    ],
)
def test_a_wrong_speed_is_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        limits(wrong)
