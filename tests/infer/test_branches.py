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
    """A stem, something beside a shortcut, and a head."""

    def __init__(self, join, **layers):
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)
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


def test_the_last_layer_and_its_bias_make_a_branch_zero():
    model = Stream(lambda x, a, b: x + b(a(x).relu()), a=conv(4, 8), b=conv(8, 4))
    size = 4 * 8 * 9 + 8 + 8 * 4 * 9 + 4
    assert found(model) == [("block", ("block.b.weight", "block.b.bias"), size)]


def test_a_norm_at_its_end_does():
    model = Stream(lambda x, a, b: b(a(x)).add_(x), a=conv(bias=False), b=nn.BatchNorm2d(4))
    assert found(model) == [("block.a", ("block.b.weight", "block.b.bias"), 4 * 4 * 9 + 8)]


def test_a_scale_at_its_end_does():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.conv = nn.Parameter(torch.ones(4, 1, 1)), conv()

        def forward(self, x):
            return F.dropout(self.scale * self.conv(x), training=self.training)

    model = Stream(lambda x, a: x + a(x), a=Scaled())
    assert found(model) == [("block.a.conv", ("block.a.scale",), 4 * 4 * 9 + 4 + 4)]


def test_of_a_product_one_factor_is_enough():
    model = Stream(lambda x, a, b: x + a(x) * b(x).sigmoid(), a=conv(), b=conv())
    assert found(model) == [("block", ("block.a.weight", "block.a.bias"), 2 * (4 * 4 * 9 + 4))]


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda x, a: x + a(x).sigmoid(), "it is not zero where its weights are"),
        (lambda x, a: x.mean((2, 3), keepdim=True) + a(x), "what is left has another shape"),
        (lambda x, a: x.half() + a(x), "what is left has another dtype"),
        (lambda x, a: (y := a(x)) + x * y, "something else reads it"),
        (lambda x, a: a(x + x), "nothing is computed for the sum alone"),
        (lambda x, a: x * a(x), "it is no sum"),
    ],
)
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
def test_what_is_one_all_the_same(join):
    assert [tensors for _, tensors, _ in found(Stream(join, a=conv()))] == [
        ("block.a.weight", "block.a.bias")
    ]


def test_weights_that_something_else_reads_gate_no_branch():
    model = Stream(lambda x, a: a(x + a(x)), a=conv())
    assert names(model) == []


def test_where_both_can_go_it_is_the_one_with_more_work():
    model = Stream(lambda x, short, long: short(x) + long(x), short=nn.Conv2d(4, 4, 1), long=conv())
    assert names(model) == ["block.long"]


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


def test_a_sum_of_three_has_a_branch_less():
    """Parallel attention and MLP: the rest of the sum is what stays."""
    model = Stream(lambda x, a, b: x + a(x) + b(x), a=conv(), b=conv())
    assert names(model) == ["block.a", "block.b"]


def test_what_writes_into_the_stream_is_none():
    model = Stream(lambda x, a: x + a(F.relu_(x)), a=conv())
    (name,) = names(model)  # relu_ belongs to the stream
    assert name == "block.a"


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
    dense = l0prune.export(model)
    assert dense.gone == (last.name,)
    assert "for SkippedModule: save_pretrained" in dense.note
    three = torch.randn(3, 4, 6)
    torch.testing.assert_close(dense.program.module()(three), model(three))


def kept(x, layer):
    """What the layer gives is also written into a part of something else."""
    found, y = torch.zeros_like(x), layer(x)
    found[:, :2] = y[:, :2]
    return (x + y) * found


def masked(x):
    """By a mask that is made by writing into parts of it, and says its dtype by what it masks."""
    mask = x.new_zeros(x.shape[1:])
    mask[:, 1:4] = 1
    mask[:, 2:3] = 2
    return x * mask


def test_what_is_written_into_a_part_of_something_that_is_read_is_no_branch_alone():
    assert names(Stream(lambda x, a: kept(x, a), a=conv())) == []


def test_what_writes_into_a_part_of_what_only_a_branch_reads_goes_with_it():
    norm, a = nn.BatchNorm2d(4), conv()
    model = Stream(lambda x, norm, a: x + a(masked(norm(x))), norm=norm, a=a)
    model = l0prune.gate(model.eval(), (X,), branches=True, exclude="*")
    bank = l0prune.gates(model)
    assert [axis.name for axis in bank.axes] == ["block.a"]
    with torch.no_grad():
        bank.log_alpha[:] = -5.0
    dense = l0prune.export(model)
    calls = {str(node.target) for node in dense.program.graph.nodes if node.op == "call_function"}
    assert calls == {"aten.conv2d.default"}
    assert dense.params == 2 * 4 + 2 + 4 * 4 + 4
    torch.testing.assert_close(dense.module(X), model(X))
