"""Switches in a plan: what is converted, what stays, and what is narrow beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import l0prune
from l0prune.infer.parts import inferred
from l0prune.plan.cost import CostModel
from l0prune.plan.layout import Cat, Const, Gated, Pick, Prod, Slots
from l0prune.plan.plan import Plan
from l0prune.plan.switches import (
    gone,
    switched,
    switches_of,
    under_switches,
    with_all_branches,
    without_switches,
)


class Dense(nn.Module):
    """Two dense layers beside a stem, and a residual branch."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 4), nn.Linear(10, 2)
        self.a, self.up, self.b = nn.Linear(4, 3), nn.Linear(7, 5), nn.Linear(5, 3)
        self.middle, self.last = nn.Linear(10, 4), nn.Linear(4, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.a(x)], 1)
        x = torch.cat([x, self.b(self.up(x).relu())], 1)
        return self.head(x + self.last(self.middle(x).relu()))


@pytest.fixture(scope="module")
def plain() -> Plan:
    return inferred(Dense().eval(), (torch.randn(2, 6),), None).plan


@pytest.fixture
def plan(plain) -> Plan:
    return switched(plain, {branch.name for branch in plain.branches})


def closed(plan, *names):
    kept = torch.ones(plan.size, dtype=torch.bool)
    for axis in plan.axes:
        if axis.name in names:
            kept[axis.start] = False
    return kept


def switch_names(plan):
    return [axis.name for axis in plan.axes if axis.kind == "branch"]


@pytest.mark.slow
def test_a_switch_that_is_not_selected_is_as_if_it_had_never_been(plain, plan):
    for name in switch_names(plan):
        others = [each for each in plan.names if each != name]
        found, expected = plan.select(others), switched(plain, others)
        assert found.names == expected.names
        assert set(found.sites) == set(expected.sites)
        assert found.tensors == expected.tensors


def test_every_count_is_that_of_the_network_without_them(plan):
    """Against the parameters of networks that are built without."""
    names = switch_names(plan)
    assert set(names) == {"a.branch", "b.branch", "last"}
    made_of = {branch.name: branch.axes for branch in plan.branches}
    is_a = {name: made_of[name] == ("a",) for name in names}
    is_b = {name: made_of[name] == ("b",) for name in names}
    for out in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(4)):
        a, b = (0 if any(is_[name] for name in out) else 3 for is_ in (is_a, is_b))
        wide = 4 + a + b
        expected = 6 * 4 + 4 + wide * 2 + 2 + (4 * a + a)
        expected += ((4 + a) * 5 + 5 + 5 * b + b) if b else 0
        if not any(not made_of[name] for name in out):
            expected += wide * 4 + 4 + 4 * wide + wide
        assert CostModel(plan).actual(closed(plan, *out), "params") == expected, out


def test_an_axis_under_a_switch_has_no_slots_without_it(plan):
    (name,) = (b.name for b in plan.branches if b.axes == ("a",))
    kept = plan.kept(closed(plan, name))
    (rows, _), (_, columns) = plan.tensors["a.weight"], plan.tensors["up.weight"]
    assert plan.mask(rows, kept).tolist() == [False] * 3
    assert plan.mask(columns, kept).tolist() == [True] * 4 + [False] * 3
    assert gone(plan, kept) == [name]


def test_layouts_are_converted_there_and_back(plain, plan):
    convert = under_switches(plan)
    changed = 0
    for name, dims in plain.tensors.items():
        assert tuple(map(convert, dims)) == plan.tensors[name]
        assert tuple(without_switches(plan, dim) for dim in plan.tensors[name]) == dims
        changed += plan.tensors[name] != dims
    assert changed


def test_all_kinds_of_layouts_come_back(plan):
    number = plan.names.index("a")
    a, convert = Slots(number, 0, 3), under_switches(plan)
    for layout in (
        a, Const(4), Cat((Const(2), a)), Prod((a, Const(3))), Prod((Cat((a, Const(1))), Const(2))),
        Gated(a, Slots(0, 0, 3)), Pick(Cat((a, a)), (5, 0, 2)),
    ):  # fmt: skip
        assert convert(layout) != layout or layout == Const(4)
        assert without_switches(plan, convert(layout)) == layout


def test_what_only_closed_branches_need_is_narrow_while_it_is_multiplied_by_zero(plan):
    for out in switch_names(plan):
        kept = with_all_branches(plan, plan.kept(closed(plan, out)))
        assert bool(kept[switches_of(plan)].all())
        widths = {axis.name: int(kept[axis.slice].sum()) for axis in plan.axes}
        (branch,) = (each for each in plan.branches if each.name == out)
        inner = {"last": "middle", "b.branch": "up"}.get(out)
        narrow = {*branch.axes, *([inner] if inner else [])}
        for axis in plan.axes:
            is_narrow = axis.name in narrow
            assert widths[axis.name] == (1 if is_narrow else axis.size), (out, axis.name)


def test_nothing_is_narrow_where_nothing_is_closed(plan):
    kept = plan.kept(torch.arange(plan.size) % 3 != 1) | switches_of(plan)
    assert torch.equal(with_all_branches(plan, kept), kept)


@pytest.mark.slow
def test_branches_alone_may_be_gated():
    """Axes that stay whole go with the branch all the same."""
    x = torch.randn(3, 6)
    model = l0prune.gate(Dense().eval(), x, exclude="*", branches=True)
    assert set(switch_names(l0prune.gates(model).plan)) == {
        a.name for a in l0prune.gates(model).axes
    }
    l0prune.gates(model).set_open(torch.zeros(3, dtype=torch.bool))
    small = l0prune.export(model)
    assert small.params == 6 * 4 + 4 + 4 * 2 + 2
    assert small.module.head.in_features == 4
    torch.testing.assert_close(small.module(x), model(x))
