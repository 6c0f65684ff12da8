"""Widths that are asked for by layer, and what comes closest where they cannot be."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning, NothingToPrune, UsageError


class Halves(nn.Module):
    """The first half gates the second; the stem is added to an input that is whole."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 1))
        self.both = nn.Conv2d(6, 24, 1)
        self.head = nn.Conv2d(12, 5, 1)

    def forward(self, x):
        one, two = self.both(x + self.stem(x)).chunk(2, 1)
        return self.head(one.sigmoid() * two)


class Shuffled(nn.Module):
    """One half is the input's, which is whole; code splits both into pieces of one size."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 5, 1)
        self.free = nn.Conv2d(5, 9, 1)
        self.last = nn.Conv2d(9, 2, 1)

    def forward(self, x):
        one, two = torch.cat([x, self.wide(x)], 1).chunk(2, 1)
        return self.last(self.free(self.head(two) + one.sum()))


def gated(kind, channels):
    torch.manual_seed(0)
    return l0prune.gate(kind().eval(), torch.randn(2, channels, 3, 3), branches=False)


def fitted(model, budget):
    """Widths that an export has after a fit, by axis."""
    counts = l0prune.fit(model, budget, l0prune.score(model, "magnitude"))
    return counts, {axis.name: int(axis.open.sum()) for axis in l0prune.gates(model).axes}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("stem: width=0.5", {"stem.0": 3, "both": 12}),  # a module, with all layers in it
        ("head*: width=3", None),
        ("both: width=5", {"stem.0": 6, "both": 5}),
    ],
)
@pytest.mark.one_in(3)
def test_a_layer_is_meant_by_its_path(budget, expected):
    model = gated(Halves, 6)
    if expected is None:
        with pytest.raises(UsageError, match=r"head.weight dim 0 is pinned, it feeds"):
            fitted(model, budget)
        return
    counts, widths = fitted(model, budget)
    assert widths == expected
    assert set(counts.values()) <= set(expected.values())


def test_the_name_of_an_axis_comes_before_the_path_of_a_layer():
    """``0`` is an axis, and a module around others."""
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(inner, nn.Linear(8, 2))
    l0prune.gate(model.eval(), torch.randn(2, 4), exclude="0.0.in")
    assert fitted(model, "0.2: width=3")[1] == {"0.0": 8, "0.2": 3}
    assert fitted(model, "0: width=2")[1] == {"0.0": 2, "0.2": 2}


def test_what_cannot_be_as_asked_comes_as_close_as_it_can_and_says_why():
    model = gated(Shuffled, 8)
    _, widths = fitted(model, "width=0.5")
    assert widths == {"head": 2, "free": 4}
    with pytest.raises(UsageError, match=r"wide.weight dim 0 is pinned, the model's code has one"):
        fitted(gated(Shuffled, 8), "wide: width=0.5")
    with pytest.warns(L0pruneWarning, match=r"head keeps 5 of 5 slots, not 7: it has no more"):
        _, widths = fitted(gated(Shuffled, 8), "[hf]*: width=7")
    assert widths == {"head": 5, "free": 7}


def test_heads_are_counted_by_a_measure_of_their_own():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 6, 10, batch_first=True)
    model = l0prune.gate(layer.eval(), torch.randn(2, 3, 24), branches=False)
    before = {axis.name: axis.size for axis in l0prune.gates(model).plan.axes}
    heads = next(name for name in before if name.endswith("heads"))
    counts, widths = fitted(model, "heads=2")
    assert counts == {f"{heads}: heads=2": 2}
    assert widths == before | {heads: 2}
    assert fitted(model, "self_attn: heads=0.5")[1][heads] == 3
    with pytest.raises(UsageError, match="no axis that is gated there has heads"):
        fitted(model, "linear1: heads=2")


@pytest.mark.slow
def test_widths_that_code_needs_alike_are_cut_together():
    """Neither half could be cut while the other was whole."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 4, batch_first=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x, x, need_weights=False)[0]

    model = l0prune.gate(Net().eval(), torch.randn(2, 3, 24), branches=False)
    dims = [axis.name for axis in l0prune.gates(model).plan.axes if axis.kind == "head_dim"]
    _, widths = fitted(model, "*head_dim*: width=0.5")
    assert [widths[name] for name in dims] == [3] * len(dims)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 9, 1), nn.ReLU(), nn.Conv2d(9, 6, 1)) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Conv2d(6, 7, 1), nn.ReLU(), nn.Conv2d(7, 2, 1))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        ((), set()),
        ("blocks.1.0", {"stem", "blocks.1.0", "blocks.1"}),  # input, output, and the whole block
        ("blocks.1", {"stem", "blocks.1.0", "blocks.1"}),
        (["head.2"], {"head.0"}),
        (["blocks.0.0", "head"], {"stem", "blocks.0.0", "blocks.0", "head.0"}),
    ],
)
@pytest.mark.one_in(3)
def test_a_layer_that_is_kept_stays_whole_on_all_sides(keep, gone):
    axes = {
        "stem",
        "head.0",
        *(f"blocks.{n}.0" for n in range(3)),
        *(f"blocks.{n}" for n in range(3)),
    }
    model = l0prune.gate(Residual().eval(), torch.randn(2, 3, 2, 2), keep=keep)
    assert {axis.name for axis in l0prune.gates(model).plan.axes} == axes - gone


def test_a_layer_to_keep_that_is_not_there_is_a_mistake():
    with pytest.raises(UsageError, match=r"keep is given for 'haed', .*no layer.* mean 'head"):
        l0prune.gate(Residual().eval(), torch.randn(2, 3, 2, 2), keep="haed")
    with pytest.raises(NothingToPrune, match=r"no axis is left to gate .*keep=\('\*',\)"):
        l0prune.gate(Residual().eval(), torch.randn(2, 3, 2, 2), keep=("*",))


@pytest.mark.parametrize("name", ["blocks.0.0", "blocks.1.2", "head.0"])  # 1.2 writes the stream
@pytest.mark.one_in(3)
def test_slots_of_ones_own_are_open_and_no_others(name):
    model = l0prune.gate(Residual().eval(), torch.randn(2, 3, 2, 2), branches=False)
    gates = l0prune.gates(model)
    gates.set_open(name, [0, 3, 5])
    of = {"blocks.1.2": "stem"}.get(name, name)
    for axis in gates.axes:
        expected = [0, 3, 5] if axis.name == of else list(range(axis.size))
        assert axis.open.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(
    ("name", "slots", "why"),
    [
        ("head.0", [7], r"head.0 has the slots 0 to 6, .*not \[7\]"),
        ("head.0", [], "not none"),
        ("head.0", None, "which slots of 'head.0'"),
        ("blocks.0", [0], "blocks.0 has several axes: stem, blocks.0.0"),
        ("haed.0", [0], "mean 'head.0'"),
    ],
)
def test_slots_that_are_not_there_are_refused(name, slots, why):
    model = l0prune.gate(Residual().eval(), torch.randn(2, 3, 2, 2), branches=False)
    with pytest.raises(UsageError, match=why):
        l0prune.gates(model).set_open(name, slots)
