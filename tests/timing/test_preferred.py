"""Blocks of slots by made-up times, of which it is plain what is best."""

import math

import pytest

from l0prune.plan.plan import Axis, Plan
from l0prune.timing.latency import preferred_blocks


def plan(*sizes, kind="channel"):
    axes = [Axis(f"a{i}", kind, size, sum(sizes[:i]), 1) for i, size in enumerate(sizes)]
    return Plan(axes=tuple(axes), pins=(), tensors={}, sites=(), costs=())


def up(width, block):
    return block * math.ceil(width / block)


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_where_time_is_linear_slots_are_counted_one_by_one(slope):
    assert preferred_blocks(plan(64, 48), lambda w: 10 + slope * (w[0] + 3 * w[1])) == [1, 1]


@pytest.mark.parametrize("block", [4, 8, 16])
def test_whole_steps_of_stairs_are_liked(block):
    def time(widths):
        return 10 + up(widths[0], block) + widths[1]

    assert preferred_blocks(plan(64, 64), time) == [block, 1]


def test_each_axis_has_its_own_even_where_sizes_are_multiplied():
    def time(widths):
        return up(widths[0], 16) * up(widths[1], 4)

    assert preferred_blocks(plan(64, 64), time) == [16, 4]


def test_a_fast_path_for_whole_blocks_is_taken_whatever_the_slope():
    def time(widths):
        return widths[0] * (1.0 if widths[0] % 8 == 0 else 1.5)

    assert preferred_blocks(plan(64), time) == [8]


def test_a_block_that_is_more_than_an_axis_may_keep_is_not_liked():
    # All of it or nothing would be 12 or 0, and 0 may not be: that is more than single slots are.
    assert preferred_blocks(plan(12), lambda w: up(w[0], 2)) == [4]


@pytest.mark.parametrize("kind", ["head", "group", "branch"])
def test_what_is_no_width_is_counted_one_by_one(kind):
    assert preferred_blocks(plan(64, kind=kind), lambda w: up(w[0], 8)) == [1]
