"""What a number is the size of, found by what it is in networks of several widths."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import l0prune
from l0prune.features.latency.sizes import (
    Size,
    SizeFinder,
    all_slots,
    constant,
    distinguishing_widths,
    sampled_widths,
    slots_of,
)
from l0prune.plan.layout import Cat, Const, Gated, Prod, Slots, axes_of
from l0prune.plan.plan import Axis, Plan

A, B = Slots(0, 0, 24), Slots(1, 0, 24)
BOTH, FLAT = Cat((A, B)), Prod((B, Const(9)))
PLAN = Plan(
    axes=(Axis("a", "channel", 24, 0, 1), Axis("b", "channel", 24, 24, 1)),
    pins=(),
    tensors={"w": (A, B), "cat": (BOTH,), "flat": (FLAT,)},
    sites=(),
    costs=(),
)
KEPT = [slots_of(PLAN, widths) for widths in ([24, 24], [7, 11], [13, 20])]
FINDER = SizeFinder(PLAN, KEPT)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ((5, 5, 5), constant(5)),
        ((24, 7, 13), Size(A)),
        ((24, 11, 20), Size(B)),
        ((48, 18, 33), Size(BOTH)),
        ((216, 99, 180), Size(FLAT)),
        ((240, 110, 200), Size(FLAT, 10, 9)),
        ((96, 28, 52), Size(A, 4)),
        ((23, 6, 12), Size(A, offset=-1)),
        ((0, 17, 11), Size(A, -1, offset=24)),
        ((24 * 24 * 2, 7 * 11 * 2, 13 * 20 * 2), Size(Prod((A, B)), 2)),
        ((24, 8, 9), None),
    ],
)
def test_a_number_is_what_has_its_sizes(numbers, found):
    size = FINDER.find(numbers)
    if found is None:
        assert size is None
        return
    assert size.is_constant == found.is_constant
    for kept, number in zip(KEPT, numbers, strict=True):
        assert size.at(int(PLAN.mask(size.layout, kept).sum())) == number
    other = slots_of(PLAN, [5, 9])
    expected = found.at(int(PLAN.mask(found.layout, other).sum()))
    assert size.at(int(PLAN.mask(size.layout, other).sum())) == expected


def test_a_factor_of_a_dim_has_a_size_too():
    """As the groups of a convolution have, which are in no shape."""
    plan = replace(PLAN, tensors={"grouped": (Prod((A, B)), B)})
    finder = SizeFinder(plan, KEPT)
    assert finder.find((24, 7, 13)) == Size(A)
    assert finder.find((24, 11, 20)) == Size(B)


def test_a_hint_decides_between_axes_that_look_alike():
    same = SizeFinder(PLAN, [slots_of(PLAN, [w, w]) for w in (24, 7, 13)])
    assert same.find((24, 7, 13), hint=B) == Size(B)
    assert same.find((24, 7, 13), hint=BOTH) == Size(A)  # a hint that does not fit is none


def test_few_heads_take_more_networks_until_all_their_products_are_told_apart():
    starts = [4 * number for number in range(24)]  # twelve times heads and what is in each
    axes = tuple(Axis(f"a{n}", "head", 4, start, 1) for n, start in enumerate(starts))
    wide = [Prod((Slots(n, 0, 4), Slots(n + 1, 0, 4))) for n in range(0, len(axes), 2)]
    plan = Plan(axes, (), {f"w{n}": (Cat((dim,) * 3),) for n, dim in enumerate(wide)}, (), ())
    drawn = distinguishing_widths(plan, 2)
    finder = SizeFinder(plan, [all_slots(plan), *(slots_of(plan, widths) for widths in drawn)])
    found = [finder.find(finder.numbers(dim)) for dim in wide]
    assert [axes_of(size.layout) for size in found] == [axes_of(dim) for dim in wide]
    assert len(drawn) > 2


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(2, 3), st.integers(0, 100)
)
def test_axes_are_told_apart_wherever_that_is_possible(sizes, count, seed):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    axes = tuple(Axis(f"a{i}", "channel", s, starts[i], 1) for i, s in enumerate(sizes))
    drawn = distinguishing_widths(Plan(axes, (), {}, (), ()), count, seed)
    keys = [(size, *widths) for size, *widths in zip(sizes, *drawn, strict=True)]
    large = [key for key in keys if key[0] >= 12]
    assert len(set(large)) == len(large)
    assert all(1 <= width <= size for size, *widths in keys for width in widths)
    assert all(min(widths) < size for size, *widths in keys if size > 2)
    assert all({*widths} == {size} for size, *widths in keys if size <= 2)
    assert torch.stack([slots_of(Plan(axes, (), {}, (), ()), w) for w in drawn]).any()


def test_compared_networks_have_no_axis_of_one_slot_where_there_were_more():
    """Exporters leave out what changes nothing at a size of 1: the files have other nodes then."""
    axes = tuple(
        Axis(f"a{n}", "head", s, at, 1)
        for n, (s, at) in enumerate(((3, 0), (4, 3), (6, 7), (12, 13), (2, 25)))
    )
    plan = Plan(axes, (), {"w": tuple(Slots(n, 0, axes[n].size) for n in range(5))}, (), ())
    drawn = [widths for seed in range(8) for widths in distinguishing_widths(plan, 2, seed)]
    assert min(map(min, drawn)) == 2
    sampled = islice(sampled_widths(plan), 40)
    assert {widths[-1] for widths in (*drawn, *sampled)} == {2}


def test_samples_begin_with_the_dense_network_and_every_other_one_leaves_axes_whole():
    first, *others = islice(sampled_widths(PLAN), 201)
    assert first == [24, 24]
    whole = [sum(width == 24 for width in widths) / 2 for widths in others]
    assert sum(whole[1::2]) / 100 == pytest.approx(0.5, abs=0.1)
    assert sum(whole[::2]) / 100 < 0.2  # by chance, and where blocks are as large
    assert len({tuple(widths) for widths in others}) > 80


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_single_inputs_are_picked_beside_whole_maps_at_every_width(order):
    """Else a file would lack the node that picks them, in whatever order maps are flattened."""
    layers = nn.Conv2d(2, 16, 2), nn.ReLU(), Permute(order), nn.Flatten(), nn.Linear(144, 3)
    model = l0prune.gate(nn.Sequential(*layers), (torch.randn(2, 2, 4, 4),), branches=False)
    plan = l0prune.gates(model).plan
    (inputs,) = (number for number, axis in enumerate(plan.axes) if axis.size == 144)
    read = plan.tensors["4.weight"][1]
    assert isinstance(read, Gated)
    for width in range(2, 144):
        widths = [width if number == inputs else axis.size for number, axis in enumerate(plan.axes)]
        kept = plan.kept(slots_of(plan, widths))
        assert int(plan.mask(read, kept).sum()) < int(plan.mask(read.base, kept).sum())


class Permute(nn.Module):
    """Dims in another order."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x.permute(self.order)
