"""The model of latency: values, sizes of layouts, and what a fit finds again."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timed_network import gated

import l0prune
from l0prune.features.latency.facts import Group
from l0prune.features.latency.latency_fit import (
    _PRICE,
    Samples,
    _left_out,
    fit_model,
    fit_smooth,
    nonnegative_least_squares,
)
from l0prune.features.latency.latency_model import LatencyModel, LayoutSizes, Step, Term
from l0prune.features.latency.table import LatencyTable, Quality, Setting
from l0prune.plan.layout import Const, Slots

IN, OUT = Slots(0, 0, 96), Slots(1, 0, 80)
STAIRS = LatencyModel(
    (IN, OUT),
    (
        Term(0, 0.5, ()),
        Term(0, 1e-3, (Step(0, 16), Step(1, 16)), (Step(0, 16),)),
        Term(0, 2e-3, (Step(0, 16), Step(1, 16)), (), ((Step(0, 16),),)),
        Term(1, 0.25, ()),
    ),
)


def up(size, block):
    return math.ceil(size / block) * block


@given(st.integers(1, 96), st.integers(1, 80))
def test_values_are_those_of_the_formula(inputs, outputs):
    work = up(inputs, 16) * up(outputs, 16)
    fast = inputs % 16 == 0
    expected = [0.5, 1e-3 * work if fast else 0.0, 0.0 if fast else 2e-3 * work, 0.25]
    assert STAIRS.values(np.array([inputs, outputs], dtype=float)).tolist() == expected


@given(st.integers(1, 96), st.integers(1, 80), st.floats(0, 1))
def test_what_was_asked_for_is_a_share_of_whole_blocks(inputs, outputs, part):
    asked = math.floor(part * inputs)
    work = asked / up(inputs, 16) * outputs / up(outputs, 16)
    found = STAIRS.asked_shares(
        np.array([inputs, outputs], float), np.array([asked, outputs], float)
    )
    assert found.tolist() == pytest.approx([1, work, work, 1])


def test_what_is_always_there_counts_as_asked_for():
    stairs = LatencyModel((Const(3), OUT), (Term(0, 1.0, (Step(0, 16), Step(1, 16))),))
    assert stairs.asked_shares(np.array([3.0, 32]), np.array([3.0, 24])).tolist() == [24 / 32]


def test_many_networks_at_once_have_the_values_of_each():
    sizes = np.random.default_rng(0).integers(1, 80, (7, 2)).astype(float)
    assert np.array_equal(STAIRS.values(sizes), np.stack([STAIRS.values(row) for row in sizes]))


def test_a_table_survives_json():
    setting = Setting("onnxruntime", "1.0", "CPU", 1, 1, "a processor", "a system")
    quality = Quality(0.01, 0.05, 12, 0.02)
    samples = (((6,), 2.5),)
    groups = (Group("first", "Gemm", ("00001",), ((), (IN, OUT))),)
    table = LatencyTable(setting, "id", 2.5, groups, STAIRS, STAIRS, quality, samples)
    data = json.loads(json.dumps(table.to_dict()))
    assert LatencyTable.from_dict(data) == table
    for part in (
        {"group": 2},
        {"factors": [{"layout": 2, "block": 16}]},
        {"factors": [{"layout": 0, "block": 0}]},
        {"ms": math.inf},
        {"ms": -0.1},
    ):
        term = {**data["model"]["terms"][0], **part}
        with pytest.raises(ValueError, match=r"terms\.0\.|no group, or of a layout"):
            LatencyTable.from_dict({**data, "model": {**data["model"], "terms": [term]}})


@given(st.integers(0, 2**32))
def test_layouts_have_the_sizes_of_their_masks(seed):
    plan = PLAN
    layouts = tuple(dict.fromkeys(dim for dims in plan.tensors.values() for dim in dims))
    open_ = torch.rand(plan.size, generator=torch.Generator().manual_seed(seed)) < 0.5
    kept = plan.kept(open_)
    expected = [int(plan.mask(layout, kept).sum()) for layout in layouts]
    assert LayoutSizes(plan, layouts)(kept).tolist() == expected


PLAN = l0prune.gates(gated()).plan
GROUPS = (
    Group("a", "Conv", ("00000",), ((), (IN,), (OUT,), (IN, OUT))),
    Group("b", "Add", ("00001",), ((), (OUT,))),
)


def sampled(count, seed=0):
    """Sizes, half of them whole blocks of 16, and their times by ``STAIRS``."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, (97, 81), (count, 2)).astype(float)
    whole = rng.random((count, 2)) < 0.5
    sizes = np.where(whole, np.ceil(sizes / 16) * 16, sizes)
    values = STAIRS.values(sizes)
    times = np.stack([values[:, :3].sum(1), values[:, 3]], 1)
    return Samples((IN, OUT), sizes, times, times.sum(1))


def test_a_fit_finds_stairs_again():
    unseen = sampled(200, seed=1)
    predicted = fit_model(GROUPS, sampled(60)).values(unseen.sizes).sum(-1)
    assert np.abs(predicted / unseen.whole - 1).max() < 1e-3


def test_what_networks_take_beyond_their_nodes_is_found():
    seen, unseen = sampled(60), sampled(200, seed=1)
    seen = Samples(seen.layouts, seen.sizes, seen.times, 1.1 * seen.whole + 3)
    predicted = fit_model(GROUPS, seen).values(unseen.sizes).sum(-1)
    assert np.abs(predicted / (1.1 * unseen.whole + 3) - 1).max() < 1e-3


@pytest.mark.parametrize("alike", [False, True])
def test_the_error_on_samples_left_out_is_that_of_leaving_them_out(alike):
    """Also where features are multiples of each other, as sizes are that nothing cuts."""
    rng = np.random.default_rng(0)
    features = rng.uniform(1, 2, (12, 3))
    if alike:
        features = np.concatenate([features, 3 * features[:, :2]], 1)
    times = features[:, :3] @ np.array([1.0, 2.0, 3.0]) + rng.uniform(-0.1, 0.1, 12)
    sums, coefficients, (found,) = _left_out(features, times, np.ones((1, 12), bool))
    error = sums[0] / 12 * (1 + _PRICE * coefficients[0])
    assert (found[:3] > 0).all()
    alone = []
    for number in range(12):
        rest = np.arange(12) != number
        others = np.linalg.lstsq(features[rest], times[rest], rcond=None)[0]
        alone.append((times[number] - features[number] @ others) ** 2)
    assert error == pytest.approx(np.mean(alone) * (1 + 3 * _PRICE), rel=1e-5)


def test_a_fast_path_of_a_kind_of_operator_is_found_where_a_single_layer_does_not_show_it():
    """It asks for fours of what is read, and for fours of what is written, 16 or more."""
    layouts = tuple(Slots(n, 0, size) for n, size in enumerate((16, 16, 32, 64)))
    pairs = [(layouts[i], layouts[j]) for i, j in ((0, 1), (1, 0), (0, 2), (2, 3), (3, 2))]
    groups = [
        Group("", "Conv", (str(n),), ((), (a,), (a, b), (b,))) for n, (a, b) in enumerate(pairs)
    ]

    def time(read, written):
        is_fast = (read % 4 == 0) & (written % 4 == 0) & (written >= 16)
        return (10 + 0.01 * read * written) * np.where(is_fast, 1, 2)

    def drawn(count, seed):
        rng = np.random.default_rng(seed)
        most = np.array([x.stop for x in layouts])
        sizes = np.ceil(rng.uniform(0.1, 1, (count, 4)) * most)
        sizes = np.where(rng.random(sizes.shape) < 0.4, np.ceil(sizes / 8) * 8, sizes)
        sizes = np.where(rng.random(sizes.shape) < 0.3, most, sizes)
        index = {layout: n for n, layout in enumerate(layouts)}
        times = [time(sizes[:, index[a]], sizes[:, index[b]]) for a, b in pairs]
        times = np.stack(times, 1)
        return Samples(layouts, sizes, times, times.sum(1))

    unseen = drawn(300, 1)
    predicted = fit_model(groups, drawn(24, 0)).values(unseen.sizes).sum(-1)
    assert np.abs(predicted / unseen.whole - 1).max() < 0.02


def test_where_all_have_the_same_widths_all_time_is_that_of_nodes():
    """Only branches can be cut: what could not be told from a constant would never go."""
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (20, 2))
    times = np.array([3.0, 1.0]) * noise
    groups = [Group(owner, "Conv", (owner,), ((),)) for owner in "ab"]
    stairs = fit_model(groups, Samples((), np.zeros((20, 0)), times, 1.2 * times.sum(1)))
    by_group = {term.group: term.ms for term in stairs.terms}
    assert by_group[2] == 0
    assert by_group[0] + by_group[1] == pytest.approx(4.8, rel=0.05)
    assert by_group[0] / by_group[1] == pytest.approx(3, rel=0.1)


def test_where_no_node_was_timed_all_time_is_a_constant():
    whole = np.array([2.0, 2.2, 1.8])
    model = fit_model([], Samples((), np.zeros((3, 0)), np.zeros((3, 0)), whole))
    smooth = fit_smooth(model, [], np.zeros((3, 0)), np.zeros(0), 2.0)
    relative = (1 / whole).sum() / (1 / whole**2).sum()  # least squares of c/whole − 1
    for each, expected in ((model, relative), (smooth, 2)):
        assert each.values(np.zeros((1, 0))).sum() == pytest.approx(expected)


def test_no_time_is_negative_however_narrow_a_network_is():
    rng = np.random.default_rng(3)
    noisy = sampled(40)
    times = noisy.times * rng.uniform(0.7, 1.3, noisy.times.shape)
    stairs = fit_model(GROUPS, Samples(noisy.layouts, noisy.sizes, times, times.sum(1)))
    everywhere = np.array([[i, j] for i in range(1, 97) for j in range(1, 81)], dtype=float)
    values = stairs.values(everywhere)
    assert (values >= 0).all()
    assert values.sum(-1).min() > 0.5


def test_smooth_times_are_those_of_whole_blocks_and_never_fall_as_widths_grow():
    sizes = np.array([[16 * i, 16 * j] for i in range(1, 7) for j in range(1, 6)], dtype=float)
    most, dense = np.array([96.0, 80.0]), float(STAIRS.values(np.array([96.0, 80.0])).sum())
    plain = fit_smooth(STAIRS, GROUPS, sizes, most, dense)
    assert all(term.ms >= 0 and not (term.aligned or term.unless) for term in plain.terms)
    assert np.allclose(plain.values(sizes).sum(-1), STAIRS.values(sizes).sum(-1), rtol=1e-6)


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_coefficients_are_found_and_none_is_negative(truth):
    features = np.random.default_rng(0).random((20, 3))
    found = nonnegative_least_squares(features, features @ np.array(truth))
    assert (found >= 0).all()
    if min(truth) >= 0:
        assert np.allclose(found, truth, atol=1e-9)
