"""Blocks of widths by the times of small networks, and the estimate of what an axis costs."""

from math import ceil

import pytest
import torch
from torch import nn

import l0prune
from l0prune.plan.width_times import (
    CONV,
    DEPTHWISE,
    LINEAR,
    OTHER_CONV,
    POINTWISE,
    WidthTimes,
    kinds_of_layers,
)

WIDTHS = sorted({*range(4, 129, 4), *range(5, 129, 6)})


def stairs(block, slow=1.0, fixed=0.0):
    """Times that count whole blocks, and are slower where a width is no multiple of four."""
    return {w: fixed + ceil(w / block) * block * (slow if w % 4 else 1.0) for w in WIDTHS}


def times(**kinds):
    return WidthTimes("a runtime", "made up", kinds, dict.fromkeys(kinds, 1e6), 1e6)


@pytest.mark.parametrize("block", [4, 8, 16, 32])
def test_a_staircase_gives_its_own_block_to_wide_axes(block):
    assert times(conv=stairs(block)).block([CONV], 256) == block


def test_where_any_width_is_as_fast_there_are_no_blocks():
    any_width = times(conv=stairs(1))
    assert [any_width.block([CONV], size) for size in (4, 8, 16, 64, 1024)] == [1] * 5


def test_a_small_axis_keeps_finer_steps_where_a_block_costs_more_than_it_gains():
    mostly_fixed = times(conv=stairs(16, fixed=200.0))
    assert mostly_fixed.block([CONV], 512) == 16
    assert mostly_fixed.block([CONV], 16) < 16


def test_a_slow_path_for_odd_widths_makes_steps_of_four():
    assert times(conv=stairs(1, slow=2.0)).block([CONV], 64) == 4


def test_kinds_that_an_axis_meets_count_together():
    both = times(conv=stairs(1), linear=stairs(32))
    assert both.block([CONV], 256) == 1
    assert both.block([CONV, LINEAR], 256) == 32
    assert both.block([OTHER_CONV], 256) == 1  # nothing is known of it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, groups=32)
        self.c, self.d = nn.Conv2d(32, 64, 1), nn.Linear(64, 48)
        self.e, self.f = nn.Conv1d(48, 24, 1), nn.Linear(24, 5)

    def forward(self, x):
        x = self.d(self.c(self.b(self.a(x)).relu()).relu().mean((2, 3))).relu()
        return self.f(self.e(x[:, :, None]).relu().flatten(1))


@pytest.fixture(scope="module")
def plan():
    model = Net()
    l0prune.gate(model, (torch.randn(2, 3, 8, 8),))
    return l0prune.gates(model).plan


@pytest.mark.slow
def test_the_plan_tells_which_kinds_of_layers_an_axis_meets(plan):
    found = dict(zip((axis.size for axis in plan.axes), kinds_of_layers(plan), strict=True))
    assert found[32] == {CONV, DEPTHWISE, POINTWISE}
    assert found[64] == {POINTWISE, LINEAR}
    assert found[48] == {LINEAR, OTHER_CONV}


def test_the_estimate_counts_arithmetic_weights_and_values(plan):
    by_hand = {"a": 3 * 32 * 9 * 64, "c": 32 * 64 * 36}
    costs = times(conv=stairs(1), pointwise=stairs(1)).costs(plan, "t")
    for owner, macs in by_hand.items():
        mine = [c.scale * torch.tensor([d.size for d in c.dims]).prod() for c in costs
                if c.owner == owner]  # fmt: skip
        assert float(max(mine)) == pytest.approx(macs / 1e6)
    assert all(cost.unit == "t" and cost.scale > 0 for cost in costs)


def test_blocks_are_described_with_their_reason(plan):
    some = times(conv=stairs(16), pointwise=stairs(16), depthwise=stairs(16), linear=stairs(1))
    said = some.describe(some.blocks(plan))
    assert "multiples of" in said
    assert "16" in said
    assert "a runtime computes fastest (made up)" in said
    assert "any number" in some.describe([1, 1])
