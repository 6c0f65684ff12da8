"""Layouts: spreading, sizes and text, against direct computation."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import spread_by_hand

from l0prune.plan import layout as L
from l0prune.plan.layout import constant_positions
from l0prune.plan.plan import Axis, Plan

VALUES = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0])
AXES = (Axis("a", "channel", 3, 0, 1), Axis("b", "channel", 2, 3, 1))

A, B = L.Slots(0, 0, 3), L.Slots(1, 0, 2)


def spread(layout):
    return Plan(AXES, (), {}, (), ()).spread(layout, VALUES)


def test_product_is_row_major():
    found = spread(L.Prod((A, L.Const(2), B)))
    expected = [a * b for a in (2, 3, 5) for _ in range(2) for b in (7, 11)]
    assert found.tolist() == expected


def test_both_multiplies_position_by_position():
    both = L.Gated(L.Prod((B, L.Const(1))), L.Slots(0, 1, 3))
    assert spread(both).tolist() == [21, 55]


def test_only_keeps_the_named_axes():
    assert L.only(L.Prod((A, B)), frozenset([1])) == L.Prod((L.Const(3), B))


def test_shows_like_einops():
    text = L.show(L.Cat((A, L.Prod((B, L.Const(49))))), ["conv1", "conv2"])
    assert text == "conv1 + conv2×·49"


def positions(size):
    return st.lists(st.integers(0, size - 1), min_size=1, max_size=4).map(tuple)


layouts = st.recursive(
    st.one_of(
        st.builds(L.Const, st.integers(1, 3)),
        st.sampled_from([A, B, L.Slots(0, 1, 2)]),
    ),
    lambda inner: st.one_of(
        st.builds(L.Cat, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(L.Prod, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        inner.filter(L.axes_of).flatmap(
            lambda base: st.builds(L.Pick, st.just(base), positions(base.size))
        ),
    ),
    max_leaves=5,
)


@given(layouts)
def test_json_reads_back(layout):
    assert L.from_json(json.loads(json.dumps(L.to_json(layout)))) == layout


@given(layouts)
def test_spread_is_as_by_hand(layout):
    expected = spread_by_hand(layout, lambda s: VALUES[3 * s.axis :][s.start : s.stop].tolist())
    assert spread(layout).tolist() == expected
    assert len(expected) == layout.size
    alive = spread_by_hand(layout, lambda s: [0.0] * (s.stop - s.start))
    assert constant_positions(layout) == sum(alive)


@pytest.mark.parametrize(
    "data", [["spiral", 3], ["pick", ["slots", 0, 0, 3], [3]], ["pick", 2, [-1]], ["pick", 2, "01"]]
)
def test_nonsense_is_no_layout(data):
    with pytest.raises(ValueError, match="not a layout"):
        L.from_json(data)
