"""Branches that are gone: out of the graph and the file, and nothing else changed."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
import torch
from differences import difference, graph_difference, onnx_difference
from torch import nn
from with_branches import Dense, Net, X, branches_of, gated, randomised

import l0prune
from l0prune.errors import UsageError
from l0prune.files.cut_layers import SKIPPED, SkippedModule
from l0prune.infer.nodes import operator_name
from l0prune.plan.plan import Plan

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def operators(graph_module):
    nodes = (node for node in graph_module.graph.nodes if node.op == "call_function")
    return Counter(operator_name(node.target).removeprefix("aten.") for node in nodes)


@pytest.mark.slow
def test_with_open_switches_nothing_changes():
    model = randomised(Net())
    before = model(X)
    model = l0prune.gate(model, X, branches=True)
    assert torch.equal(model(X), before)
    assert branches_of(model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert l0prune.export(model).widths["blocks.0"] == (1, 1)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("closed", [("blocks.0",), ("blocks.2", "blocks.1"), BLOCKS])
@pytest.mark.slow
def test_closed_branches_are_gone(closed, writes, tmp_path):
    model = gated(Net(writes), *closed)
    small = l0prune.export(model)
    assert difference(model, small, X) <= 1e-10
    assert graph_difference(model, small, X) <= 1e-10
    left = 2 * (3 - len(closed))
    assert operators(small.program.graph_module)["conv2d"] == 1 + 1 + left
    small.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, small, tmp_path / "model.onnx", X) <= 1e-5
    graph = onnx.load(tmp_path / "model.onnx").graph
    counted = Counter(node.op_type for node in graph.node)
    assert counted["Conv"] == 2 + left
    assert counted["Add"] == 3 - len(closed)
    sizes = [torch.tensor(each.dims).prod() for each in graph.initializer]
    assert all(int(size) for size in sizes)
    assert small.params == sum(p.numel() for p in small.module.parameters())
    for name in closed:
        assert small.widths[name] == (0, 1)


class Written(nn.Module):
    """Without its branch the sum would be the stream itself, which is written over later."""

    def __init__(self, into_the_sum):
        super().__init__()
        self.stem, self.inner, self.head = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.into_the_sum = into_the_sum

    def forward(self, x):
        x = self.stem(x)
        if self.into_the_sum:
            y = x + self.inner(x)
            return self.head(y.relu_() + 2 * x)
        y = x.transpose(2, 3) + self.inner(x.transpose(2, 3))
        x.relu_()
        return self.head(y.transpose(2, 3) + 2 * x)


@pytest.mark.parametrize("into_the_sum", [True, False])
@pytest.mark.one_in(2)
def test_what_is_written_in_place_later_changes_neither_stream_nor_sum(into_the_sum):
    model = gated(Written(into_the_sum), "inner")
    assert branches_of(model) == ["inner"]
    small = l0prune.export(model)
    assert difference(model, small, X) <= 1e-10
    assert graph_difference(model, small, X) <= 1e-10


class Steps(nn.Module):
    """Layers from a list, side by side at the end; one value is written over and read no more."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)
        self.layers = nn.ModuleList([nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 4, 1)])

    def forward(self, x):
        values = [self.stem(x)]
        for layer in self.layers:
            values.append(layer(values[-1]))
        values[1].relu_()
        return self.head(torch.cat([values[0], values[2]], 1))


@pytest.mark.slow
def test_what_is_written_in_place_for_nobody_goes_with_its_branch():
    model = gated(Steps(), "layers")
    assert branches_of(model) == ["layers"]
    small = l0prune.export(model)
    assert operators(small.program.graph_module)["conv2d"] == 2
    assert difference(model, small, X) <= 1e-10
    assert sum(p.numel() for p in small.program.parameters()) == small.params


class Centred(nn.Module):
    """A norm by hand, which is nonlinear at closed slots, over a stream with two branches."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 9, 1), nn.Conv2d(9, 4, 1)
        self.first, self.second = nn.Conv2d(9, 9, 3, padding=1), nn.Conv2d(9, 9, 1)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.first(x).relu()
        x = x + self.second(x)
        x = x - x.mean(1, keepdim=True)
        return self.head(x / (x.pow(2).mean(1, keepdim=True) + 1e-3).sqrt())


@pytest.mark.parametrize("closed", [("first",), ("second",), ("first", "second")], ids=" and ".join)
@pytest.mark.slow
def test_averages_over_a_stream_know_where_it_is_zero_without_its_branches(closed):
    model = gated(Centred(), *closed)
    assert set(branches_of(model)) == {"first", "second"}
    small = l0prune.export(model)
    kept, all_ = small.widths["stem"]
    assert kept < all_
    assert difference(model, small, X) <= 1e-10
    assert graph_difference(model, small, X) <= 1e-10


def test_by_name_or_glob_and_beside_axes():
    model = l0prune.gate(randomised(Net()), X, branches="blocks.[01]", include=["blocks.2.*"])
    kinds = {axis.name: axis.kind for axis in l0prune.gates(model).axes}
    assert [name for name, kind in kinds.items() if kind == "branch"] == ["blocks.0", "blocks.1"]
    assert all(name.startswith("blocks") for name in kinds)
    for wrong, text in (
        ({"branches": ["layer9"]}, "no branch of this model"),
        ({"branches": True, "keep_class": "native"}, "SkippedModule"),
    ):
        with pytest.raises(UsageError, match=text):
            l0prune.gate(Net().eval(), X, **wrong)


@pytest.mark.slow
def test_a_gated_model_keeps_its_switches():
    model = gated(Net(), "blocks.0")
    plan = l0prune.gates(model).plan
    assert Plan.from_json(plan.to_json()) == plan
    again = l0prune.gate(Net(), X, branches=True)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(X), model(X))


class Encoder(nn.Module):
    """A layer of torch's own between two Linears."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.head(self.layer(self.stem(x)))


@pytest.mark.parametrize(
    ("closed", "operator"),
    [("layer.self_attn", "scaled_dot_product_attention"), ("layer", "relu")],
)
@pytest.mark.slow
def test_transformers_lose_attention_and_mlp(closed, operator):
    x = torch.randn(2, 5, 4)
    model = gated(Encoder(), closed, x=x)
    assert branches_of(model) == ["layer.self_attn", "layer"]
    assert operator in operators(l0prune.export(gated(Encoder(), x=x)).program.graph_module)
    small = l0prune.export(model)
    assert operator not in operators(small.program.graph_module)
    assert difference(model, small, x) <= 1e-10


LAYERS = ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(
    "closed", [("layers.1",), ("layers.0", "layers.2"), (*LAYERS, "wide.branch")]
)
@pytest.mark.one_in(3)
def test_parts_of_concatenations_are_gone(closed, tmp_path):
    model = gated(Dense(), *closed)
    assert set(branches_of(model)) == {*LAYERS, "wide.branch"}
    small = l0prune.export(model)
    assert difference(model, small, X) <= 1e-10
    assert graph_difference(model, small, X) <= 1e-10
    assert type(small.module) is Dense
    for name in closed:
        left = small.module.get_submodule(name.removesuffix(".branch"))
        assert isinstance(left, SkippedModule)
    layers = 3 - len({*LAYERS} & {*closed})
    wide = int("wide.branch" not in closed)
    left = operators(small.program.graph_module)
    assert left["conv2d"] == 1 + 2 * layers + wide + 1
    small.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, small, tmp_path / "model.onnx", X) <= 1e-5
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert Counter(node.op_type for node in graph.node)["Conv"] == left["conv2d"]
    assert all(len(node.input) > 1 for node in graph.node if node.op_type == "Concat")
    assert all(all(each.dims) for each in graph.initializer)
    assert {small.widths[name] for name in closed} == {(0, 1)}
    assert small.params == sum(p.numel() for p in small.module.parameters())


class InParts(nn.Module):
    """What torch.export cannot follow as a whole: the body and the head are parts of it."""

    def __init__(self, shares=False):
        super().__init__()
        self.body, self.head = Net(), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        self.shares = shares

    def forward(self, x):
        y = self.body(x)
        y = self.head(y) if y.sum() > -1e9 else -self.head(y)
        return y + self.body.blocks[2].bn2.bias.sum() if self.shares else y


@pytest.mark.slow
def test_branches_of_parts(tmp_path):
    model = randomised(InParts())
    names = [branch.name for branch in l0prune.survey(model, X).branches]
    assert names == ["body.blocks.0", "body.blocks.1", "body.blocks.2"]
    model = gated(InParts(), *names[1:])
    small = l0prune.export(model)
    assert small.gone == tuple(names[1:])
    assert difference(model, small, X) <= 1e-10
    assert isinstance(small.module.body.blocks[2], SKIPPED)
    counted = sum(p.numel() for p in small.module.parameters())
    assert counted == small.params < sum(p.numel() for p in InParts().parameters())
    small.save_onnx(tmp_path / "model.onnx")
    (body, *_) = sorted(tmp_path.glob("*body*.onnx"))
    convolutions = [n for n in onnx.load(body).graph.node if n.op_type == "Conv"]
    assert len(convolutions) == 1 + 2 + 1


def test_a_branch_of_a_part_that_code_around_it_reads_has_no_gate():
    names = [branch.name for branch in l0prune.survey(randomised(InParts(True)), X).branches]
    assert names == ["body.blocks.0", "body.blocks.1"]
