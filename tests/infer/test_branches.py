"""What is found to be a branch, and what makes it zero."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l0prune
from l0prune.infer.parts import inferred
from l0prune.plan.cost import CostModel
from l0prune.plan.switches import switched

X = torch.randn(2, 4, 6, 6)


class Stream(nn.Module):
    """A stem, something beside a shortcut or other maps, and a head that reads so many."""

    def __init__(self, join, reads=4, **layers):
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(reads, 2, 1)
        self.block = nn.ModuleDict(layers)
        self.join = join

    def forward(self, x):
        return self.head(self.join(self.stem(x), **self.block))


def conv(inputs=4, outputs=4, **settings):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **settings)


def found(model, x=X):
    """Of each branch: its name, what is multiplied, and how many parameters only it has."""
    plan = inferred(model.eval(), (x,), None).plan
    return [(branch.name, branch.tensors, branch.size) for branch in plan.branches]


def names(model, x=X):
    return [name for name, *_ in found(model, x)]


def kept(x, layer):
    """What the layer gives is also written into a part of something else."""
    found, y = torch.zeros_like(x), layer(x)
    found[:, :2] = y[:, :2]
    return (x + y) * found


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.conv = nn.Parameter(torch.ones(4, 1, 1)), conv()

    def forward(self, x):
        return F.dropout(self.scale * self.conv(x), training=self.training)


CONV = 4 * 4 * 9 + 4


@pytest.mark.parametrize(
    ("model", "name", "tensors", "size"),
    [
        (
            Stream(lambda x, a, b: x + b(a(x).relu()), a=conv(4, 8), b=conv(8, 4)),
            "block",
            ("block.b.weight", "block.b.bias"),
            4 * 8 * 9 + 8 + 8 * 4 * 9 + 4,
        ),
        (
            Stream(lambda x, a, b: b(a(x)).add_(x), a=conv(bias=False), b=nn.BatchNorm2d(4)),
            "block.a",
            ("block.b.weight", "block.b.bias"),
            4 * 4 * 9 + 8,
        ),
        (
            Stream(lambda x, a: x + a(x), a=Scaled()),
            "block.a.conv",
            ("block.a.scale",),
            CONV + 4,
        ),
        (
            Stream(lambda x, a, b: x + a(x) * b(x).sigmoid(), a=conv(), b=conv()),
            "block",
            ("block.a.weight", "block.a.bias"),
            2 * CONV,
        ),
    ],
    ids=["the last layer and its bias", "a norm", "a scale", "one factor of a product"],
)
@pytest.mark.one_in(4)
def test_what_makes_a_branch_zero(model, name, tensors, size):
    assert found(model) == [(name, tensors, size)]


@pytest.mark.parametrize(
    ("join", "layers", "expected"),
    [
        # the one with more work
        (lambda x, short, long: short(x) + long(x), ("short", "long"), ["block.long"]),
        # parallel attention and MLP: the rest of the sum is what stays
        (lambda x, a, b: x + a(x) + b(x), ("a", "b"), ["block.a", "block.b"]),
        # relu_ belongs to the stream
        (lambda x, a: x + a(F.relu_(x)), ("a",), ["block.a"]),
    ],
)
@pytest.mark.one_in(3)
def test_which_operand_of_a_sum_it_is(join, layers, expected):
    made = {name: nn.Conv2d(4, 4, 1) if name == "short" else conv() for name in layers}
    assert names(Stream(join, **made)) == expected


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda x, a: x + a(x).sigmoid(), "it is not zero where its weights are"),
        (lambda x, a: x.mean((2, 3), keepdim=True) + a(x), "what is left has another shape"),
        (lambda x, a: x.half() + a(x), "what is left has another dtype"),
        (lambda x, a: (y := a(x)) + x * y, "something else reads it"),
        (lambda x, a: a(x + x), "nothing is computed for the sum alone"),
        (lambda x, a: x * a(x), "it is no sum"),
        (lambda x, a: a(x + a(x)), "something else reads its weights"),
        (lambda x, a: kept(x, a), "it is written into a part of something that is read"),
    ],
)
@pytest.mark.one_in(8)
def test_what_is_no_branch(join, why):
    assert names(Stream(join, a=conv())) == [], why


@pytest.mark.parametrize(
    "join",
    [
        lambda x, a: x + a(x).mean((2, 3), keepdim=True),
        lambda x, a: a(a(x)) + x,
        lambda x, a: torch.add(x, a(x), alpha=0.5),
    ],
    ids=["broadcast", "one layer twice", "times a number"],
)
@pytest.mark.one_in(3)
def test_what_is_one_all_the_same(join):
    assert [tensors for _, tensors, _ in found(Stream(join, a=conv()))] == [
        ("block.a.weight", "block.a.bias")
    ]


@pytest.mark.slow
def test_a_branch_in_a_branch():
    model = Stream(
        lambda x, a, b, c: x + c((y := a(x)) + b(y)), a=conv(4, 8), b=conv(8, 8), c=conv(8, 4)
    )
    assert names(model) == ["block.b", "block"]
    plan = inferred(model, (X,), None).plan
    needed = {cost.tensor: cost.needed for cost in plan.costs if cost.unit == "macs"}
    assert needed["block.b.weight"] == (("block", "block.b"),)
    assert needed["block.a.weight"] == (("block",),)
    assert needed["stem.weight"] == needed["head.weight"] == ((),)


def test_what_two_branches_share_is_needed_for_either():
    """A norm before attention and MLP in parallel."""
    model = Stream(
        lambda x, norm, a, b: x + a(y := norm(x)) + b(y), norm=nn.BatchNorm2d(4), a=conv(), b=conv()
    )
    plan = inferred(model.eval(), (X,), None).plan
    needed = {cost.tensor: cost.needed for cost in plan.costs if cost.unit == "params"}
    assert needed["block.norm.weight"] == (("block.a",), ("block.b",))
    switched_plan = switched(plan, ["block.a", "block.b"])
    for a, b in itertools.product((0, 1), repeat=2):
        kept = torch.ones(switched_plan.size, dtype=torch.float64)
        kept[-2:] = torch.tensor([a, b])
        block = 8 * (a or b) + (a + b) * (4 * 4 * 9 + 4)
        others = sum(p.numel() for each in (model.stem, model.head) for p in each.parameters())
        assert CostModel(switched_plan).amount(kept, "params") == block + others


def test_what_is_needed_in_too_many_ways_is_always():
    """One input of eight branches in a row: the last ones have no switch."""

    def join(x, first, **rest):
        read = first(x)
        for layer in rest.values():
            x = x + layer(read)
        return x

    layers = {f"l{number}": conv() for number in range(8)}
    model = Stream(join, first=conv(), **layers)
    plan = inferred(model.eval(), (X,), None).plan
    found = {branch.name for branch in plan.branches}
    assert "block.l0" in found
    assert len(found) < 8
    needed = {cost.tensor: cost.needed for cost in plan.costs if cost.unit == "params"}
    assert needed["block.first.weight"] == ((),)


def test_a_layer_that_is_called_in_two_branches_is_neither_ones_own():
    """A layer without weights may be in several."""
    model = Stream(
        lambda x, a, b, act: (y := x + a(act(x))) + b(act(y)), a=conv(), b=conv(), act=nn.GELU()
    )
    plan = inferred(model.eval(), (X,), None).plan
    assert [branch.modules for branch in plan.branches] == [("block.a",), ("block.b",)]


def test_pre_and_post_norm_of_transformers():
    for norm_first in (True, False):
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, batch_first=True, norm_first=norm_first, dropout=0.0
        )
        model = nn.Sequential(layer, nn.Linear(8, 3))
        assert [tensors for _, tensors, _ in found(model, torch.randn(2, 5, 8))] == [
            ("0.self_attn.out_proj.weight", "0.self_attn.out_proj.bias"),
            ("0.linear2.weight", "0.linear2.bias"),
        ]


def test_a_single_layer_has_a_name_of_its_own_beside_its_axis():
    model = Stream(lambda x, a: x + a(x), a=conv(8 // 2, 4))
    survey = l0prune.survey(model.eval(), (X,))
    taken = {axis.name for axis in survey.axes}
    assert not taken & {branch.name for branch in survey.branches}


def test_the_survey_says_it():
    survey = l0prune.survey(Stream(lambda x, a: x + a(x), a=conv()).eval(), (X,))
    said = " ".join(str(survey).split())
    assert "1 branch can go as a whole" in said
    assert survey.to_dict()["branches"][0]["name"] == survey.branches[0].name


@pytest.mark.slow
def test_a_long_way_from_its_parameters_is_none():
    """Nor does it fill Python's stack."""

    def join(x, a):
        y = a(x)
        for _ in range(600):
            y = y * 1.01
        return x + y

    assert names(Stream(join, a=conv())) == []


class Deep(nn.Module):
    """Seven residual layers whose code asks for one size."""

    def __init__(self, layers=7):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x):
        rows = 2 * x.shape[0]
        for layer in self.layers:
            x = x + layer(x.reshape(rows, -1, 6)).reshape(x.shape)
        return x.mean(1)


def test_a_size_that_many_branches_go_by_takes_none_away():
    """With a free batch such a size is a node of the graph, which is needed while one is there."""
    x = torch.randn(2, 4, 6)
    model = l0prune.gate(Deep().eval(), (x,), branches=True)
    bank = l0prune.gates(model)
    last = [axis for axis in bank.axes if axis.kind == "branch"][-1]
    with torch.no_grad():
        bank.log_alpha[last.slice] = -5.0
    small = l0prune.export(model)
    assert small.gone == (last.name,)
    assert not small.note
    three = torch.randn(3, 4, 6)
    torch.testing.assert_close(small.program.module()(three), model(three))


def masked(x):
    """By a mask that is made by writing into parts of it, and says its dtype by what it masks."""
    mask = x.new_zeros(x.shape[1:])
    mask[:, 1:4] = 1
    mask[:, 2:3] = 2
    return x * mask


def test_what_writes_into_a_part_of_what_only_a_branch_reads_goes_with_it():
    norm, a = nn.BatchNorm2d(4), conv()
    model = Stream(lambda x, norm, a: x + a(masked(norm(x))), norm=norm, a=a)
    model = l0prune.gate(model.eval(), (X,), branches=True, exclude="*")
    bank = l0prune.gates(model)
    assert [axis.name for axis in bank.axes] == ["block.a"]
    with torch.no_grad():
        bank.log_alpha[:] = -5.0
    small = l0prune.export(model)
    calls = {str(node.target) for node in small.program.graph.nodes if node.op == "call_function"}
    assert calls == {"aten.conv2d.default"}
    assert small.params == 2 * 4 + 2 + 4 * 4 + 4
    torch.testing.assert_close(small.module(X), model(X))


# --- parts of concatenations ----------------------------------------------------------------


def made_of(model):
    """Of each branch: its name, the axes that it is made of, and the parameters only it has."""
    plan = inferred(model.eval(), (X,), None).plan
    return [(branch.name, branch.axes, branch.size) for branch in plan.branches]


def cat(*parts):
    return torch.cat(parts, 1)


def test_all_but_the_one_with_least_work():
    model = Stream(
        lambda x, a, b, c: cat(a(x).relu(), b(x), c(x)), 14,
        a=conv(4, 6), b=nn.Conv2d(4, 4, 1), c=conv(),
    )  # fmt: skip
    assert made_of(model) == [
        ("block.a.branch", ("block.a",), 6 * 4 * 9 + 6),
        ("block.c.branch", ("block.c",), 4 * 4 * 9 + 4),
    ]


def test_a_path_of_several_layers_goes_as_a_whole():
    model = Stream(
        lambda x, a, b, c: cat(b(a(x).relu()), c(x)), 10,
        a=conv(4, 6), b=conv(6, 6), c=nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    assert made_of(model) == [("block", ("block.b",), 6 * 4 * 9 + 6 + 6 * 6 * 9 + 6)]


@pytest.mark.slow
def test_what_is_read_again_and_again_beside_others():
    """As in a DenseNet: each layer reads the stem and all layers before it."""

    def join(x, a, b, c):
        parts = [x]
        for layer in (a, b, c):
            parts.append(layer(cat(*parts)))
        return cat(*parts)

    model = Stream(join, 13, a=conv(4, 3), b=conv(7, 3), c=conv(10, 3))
    assert {axes for _, axes, _ in made_of(model)} == {("block.a",), ("block.b",), ("block.c",)}
    plan = inferred(model, (X,), None).plan
    needed = {cost.tensor: cost.needed for cost in plan.costs if cost.unit == "macs"}
    assert needed["block.a.weight"] == (("block.a.branch",),)
    assert needed["stem.weight"] == needed["head.weight"] == ((),)


def test_a_concatenation_that_is_part_of_another():
    model = Stream(
        lambda x, a, b, c, d: cat(cat(b(y := a(x)), c(y)), d(x)), 12,
        a=conv(), b=conv(), c=nn.Conv2d(4, 4, 1), d=nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    assert {axes for _, axes, _ in made_of(model)} == {("block.b", "block.c"), ("block.b",)}


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda x, a: cat(y := a(x), y), "both parts are the same"),
        (lambda x, a: cat(y := a(x), x) + y.mean(), "something else reads it"),
        (lambda x, a: cat(a(x), x).split(4, 1)[0].repeat(1, 2, 1, 1), "it is on its own later"),
        (lambda x, a: cat(a(x), x).flip(1)[:, ::2].repeat(1, 2, 1, 1), "single slots are picked"),
        (lambda x, a: cat(a(x) + x, x), "its slots are those of the stream"),
        (lambda x, a: cat(x.relu(), x), "nothing is computed for it"),
        (lambda x, a: cat(x.half(), a(x)), "what is left has another dtype"),
        (lambda x, a: torch.stack([a(x), x], 1).flatten(1, 2), "it is no concatenation"),
        (lambda x, a: cat(a(x)).repeat(1, 2, 1, 1), "there is nothing beside it"),
        (lambda x, a: torch.cat([a(x), x], 2).repeat(1, 2, 1, 1), "no axis is put side by side"),
    ],
)
@pytest.mark.one_in(3)
def test_what_is_no_branch_of_a_concatenation(join, why):
    assert [axes for _, axes, _ in made_of(Stream(join, 8, a=conv())) if axes] == [], why


@pytest.mark.slow
def test_a_path_that_cannot_be_cut_is_none():
    """Whatever reads the maps by number keeps them all."""
    for join, is_one in (
        (lambda x, a, b: cat(b(a(x)), x), True),
        (lambda x, a, b: cat(b(a(x)).sort(1)[0], x), False),
    ):
        assert bool(names(Stream(join, 8, a=conv(), b=conv()))) == is_one
