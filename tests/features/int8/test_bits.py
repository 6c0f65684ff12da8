"""Bits as axes of a plan, and what they cost, beside counting by hand."""

from itertools import product

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.int8.bits import bit_price, bits_left, check_menu, with_bits, without_bits
from l0prune.features.int8.ranges import QuantizedLayer, Scheme
from l0prune.plan.limits import bounds, limits
from l0prune.plan.measures import measure_of
from l0prune.plan.plan import Plan

MENU = (2, 4, 8)
INFINITE = float("inf")
# The output of the second layer is not quantized, and what the third reads stays in float32.
SCHEME = Scheme(
    (QuantizedLayer("0", "0.weight", 0, True), QuantizedLayer("2", "2.weight", 1, True)),
    ((-INFINITE, INFINITE), (0.0, INFINITE)),
    {},
)


@pytest.fixture(scope="module")
def plan():
    """Two axes of slots, of 2 and 3, and four of bits."""
    layers = nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)
    model = l0prune.gate(nn.Sequential(*layers), torch.zeros(2, 3), exclude="*.in")
    return with_bits(l0prune.gates(model).plan, SCHEME, MENU)


def by_hand(plan, z):
    """BOPs of a network with these gates, 0 and 1; 32 bits where an axis has none."""
    axes = {axis.name: z[axis.slice] for axis in plan.axes}
    inner, outer = (int(axes[name].sum()) for name in ("0", "2"))

    def bits(name):
        if f"{name}.bits" not in axes:
            return 32
        four, eight = axes[f"{name}.bits"][1:].tolist()
        return (8 if eight else 4) if four else 2

    return (
        3 * inner * bits("0.weight") * bits("0.input")
        + inner * outer * bits("2.weight") * bits("2.input")
        + outer * 4 * 32 * 32
    )


def test_each_weight_and_each_input_has_an_axis(plan):
    assert [(a.name, a.kind, a.size) for a in plan.axes] == [
        ("0", "neuron", 2),
        ("2", "neuron", 3),
        *((f"{n}.bits", "bits", 3) for n in ("0.weight", "2.weight", "0.input", "2.input")),
    ]
    assert plan.slots == 5
    assert Plan.from_json(plan.to_json()) == plan
    assert with_bits(without_bits(plan), SCHEME, MENU) == plan


def test_actual_bops_are_those_counted_by_hand(plan):
    bops = measure_of(plan, "bops")
    assert bops.dense() == 32 * 32 * (6 + 6 + 12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        open_ = torch.rand(plan.size, generator=generator) < 0.6
        assert bops.actual(open_) == by_hand(plan, plan.kept(open_))


def test_expected_bops_are_the_mean_over_all_gates(plan):
    """The gates that count are 5 + 2·2; the first of each axis of bits does not."""
    plan = with_bits(without_bits(plan), Scheme(SCHEME.layers[:1], SCHEME.bounds, {}), MENU)
    bops = measure_of(plan, "bops")
    p = torch.rand(plan.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counted = [*range(5), *(n for n in range(5, plan.size) if (n - 5) % 3)]
    mean = 0.0
    for choice in product((0, 1), repeat=len(counted)):
        z = torch.zeros(plan.size, dtype=torch.int64)
        z[counted] = torch.tensor(choice)
        chance = torch.where(z[counted] > 0, p[counted], 1 - p[counted]).prod()
        mean += float(chance) * by_hand(plan, z)
    assert float(bops.expected(p)) == pytest.approx(mean, rel=1e-12)
    p.requires_grad_()
    assert torch.autograd.gradcheck(bops.expected, p)
    (slope,) = torch.autograd.grad(bops.expected(p), p)
    assert bool((slope[counted] > 0).all())


def test_without_bits_each_product_is_of_float32(plan):
    plain = without_bits(plan)
    bops, macs = (measure_of(plain, name) for name in ("bops", "macs"))
    open_ = torch.tensor([True, False, True, True, False])
    assert bops.actual(open_) == 1024 * macs.actual(open_)
    assert float(bops.expected(open_.double())) == 1024 * float(macs.expected(open_.double()))


def test_a_budget_is_a_share_of_the_dense_network_in_float32(plan):
    (bound,) = bounds(plan, limits("bops=0.5"))
    everything = torch.ones(plan.size, dtype=torch.bool)
    in_eight = (12 * 64 + 12 * 1024) / (24 * 1024)
    assert bound.actual_share(everything) == pytest.approx(in_eight)
    assert float(bound.expected_share(everything.double())) == pytest.approx(in_eight)


def test_the_price_of_bits_is_the_regulariser_of_the_paper(plan):
    """Both quantized layers have 6 MACs, and the largest one, in floating point, has 12."""
    p = torch.rand(plan.size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = 0.0
    for axis in plan.axes[2:]:
        four, eight = p[axis.slice][1:].tolist()
        expected += 6 / 12 * (4 * four + 8 * four * eight)
    assert float(bit_price(plan, MENU).expected(p, "bits")) == pytest.approx(expected, rel=1e-12)


def test_bits_end_at_the_first_gate_that_is_closed(plan):
    open_ = torch.ones(plan.size, dtype=torch.bool)
    open_[5 + 1] = False  # four bits of the first weight, whose eight are open
    open_[5 + 3] = False  # two bits of the second, which stay
    found = bits_left(plan, open_, MENU)
    assert found == {
        "0.weight.bits": 2,
        "2.weight.bits": 8,
        "0.input.bits": 8,
        "2.input.bits": 8,
    }


@pytest.mark.parametrize("menu", [(0, 8), (0, 4, 8), (0, 2, 4, 8, 16), (0, 2, 6)])
def test_menus(menu):
    assert check_menu(menu) == menu[1:]


@pytest.mark.parametrize(
    "menu", [(), (0,), (4, 8), (0, 8, 4), (0, 2, 3), (0, 1, 2), (0, 16, 32), (0, 2.0), (0, -2)]
)
def test_what_is_no_menu_is_said(menu):
    with pytest.raises(UsageError, match="is no menu"):
        check_menu(menu)
