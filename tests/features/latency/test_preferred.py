"""Blocks of slots by made-up times, of which it is plain what is best."""

import math

import numpy as np
import pytest

from l0prune.features.latency.latency import preferred_blocks
from l0prune.plan.plan import Axis, Plan


def plan(*sizes, kind="channel"):
    axes = [Axis(f"a{i}", kind, size, sum(sizes[:i]), 1) for i, size in enumerate(sizes)]
    return Plan(axes=tuple(axes), pins=(), tensors={}, sites=(), costs=())


def of_each(time):
    return lambda networks: np.array([time(widths) for widths in networks], float)


def up(width, block):
    return block * math.ceil(width / block)


@pytest.mark.parametrize(
    ("sizes", "time", "blocks"),
    [
        # where time is linear slots are counted one by one
        ((64, 48), lambda w: 10, [1, 1]),
        ((64, 48), lambda w: 10 + w[0] + 3 * w[1], [1, 1]),
        # whole steps of stairs
        ((64, 64), lambda w: 10 + up(w[0], 4) + w[1], [4, 1]),
        ((64, 64), lambda w: 10 + up(w[0], 16) + w[1], [16, 1]),
        # to each axis its own, even where sizes are multiplied
        ((64, 64), lambda w: up(w[0], 16) * up(w[1], 4), [16, 4]),
        # a fast path for whole blocks, whatever the slope
        ((64,), lambda w: w[0] * (1.0 if w[0] % 8 == 0 else 1.5), [8]),
        # all of it or nothing would be 12 or 0, and 0 may not be: that is more than single slots
        ((12,), lambda w: up(w[0], 2), [4]),
    ],
)
def test_blocks_are_those_of_least_time(sizes, time, blocks):
    assert preferred_blocks(plan(*sizes), of_each(time)) == blocks


@pytest.mark.parametrize("kind", ["head", "group", "branch"])
def test_what_is_no_width_is_counted_one_by_one(kind):
    assert preferred_blocks(plan(64, kind=kind), of_each(lambda w: up(w[0], 8))) == [1]
