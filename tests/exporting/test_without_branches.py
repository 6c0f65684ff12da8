"""Branches that are gone: out of the graph, the file and the class, and nothing else changed."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
import torch
import torch.nn.functional as F
from differences import difference, graph_difference, onnx_difference
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.files.pretrained.cut_layers import PassedBy
from l0prune.infer.nodes import operator_name
from l0prune.plan.plan import Plan

X = torch.randn(2, 3, 8, 8)


class Block(nn.Module):
    """Two convolutions beside a shortcut, as He et al. write it, in place where ``writes``."""

    def __init__(self, inputs=8, outputs=8, stride=1, writes=False):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 12, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(12), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(12, outputs, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=writes)
        changes = stride > 1 or inputs != outputs
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if changes else None
        self.writes = writes

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x = x if self.short is None else self.short(x)
        if self.writes:
            y += x
            return self.relu(y)
        return F.relu(x + y)


class Net(nn.Module):
    def __init__(self, writes=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(writes=writes), Block(8, 16, 2, writes), Block(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def randomised(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.2 if tensor.ndim == 1
                             else torch.randn(tensor.shape) * 0.3)  # fmt: skip
    return model.eval()


def gated(model, *closed, x=X, **kwargs):
    """With a switch on every branch, those named closed, and a third of all slots."""
    model = l0prune.gate(randomised(model), *([x] if not kwargs else [(), kwargs]), branches=True)
    gates = l0prune.gates(model)
    open_ = torch.rand(gates.plan.size, generator=torch.Generator().manual_seed(0)) > 0.33
    for axis in gates.plan.axes:
        if axis.kind == "branch":
            open_[axis.start] = axis.name not in closed
    gates.put(open_)
    return model


def branches_of(model):
    return [axis.name for axis in l0prune.gates(model).axes if axis.kind == "branch"]


def operators(graph_module):
    nodes = (node for node in graph_module.graph.nodes if node.op == "call_function")
    return Counter(operator_name(node.target).removeprefix("aten.") for node in nodes)


def test_with_open_switches_nothing_changes():
    model = randomised(Net())
    before = model(X)
    model = l0prune.gate(model, X, branches=True)
    assert torch.equal(model(X), before)
    assert branches_of(model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert l0prune.export(model).widths["blocks.0"] == (1, 1)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("closed", [("blocks.0",), ("blocks.2", "blocks.1")])
@pytest.mark.one_in(4)
def test_closed_branches_are_gone(closed, writes, tmp_path):
    model = gated(Net(writes), *closed)
    dense = l0prune.export(model)
    assert difference(model, dense, X) <= 1e-10
    assert graph_difference(model, dense, X) <= 1e-10
    left = 2 * (3 - len(closed))
    assert operators(dense.program.graph_module)["conv2d"] == 1 + 1 + left
    dense.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, dense, tmp_path / "model.onnx", X) <= 1e-5
    graph = onnx.load(tmp_path / "model.onnx").graph
    counted = Counter(node.op_type for node in graph.node)
    assert counted["Conv"] == 2 + left
    assert counted["Add"] == 3 - len(closed)
    sizes = [torch.tensor(each.dims).prod() for each in graph.initializer]
    assert all(int(size) for size in sizes)
    assert dense.params == sum(p.numel() for p in dense.module.parameters())
    for name in closed:
        assert dense.widths[name] == (0, 1)


def test_a_class_goes_on_without_them():
    dense = l0prune.export(gated(Net(), "blocks.2", "blocks.1"))
    assert dense.rebuilt, dense.note
    assert type(dense.module) is Net
    # Of the last block nothing is left; the second still has its shortcut.
    assert isinstance(dense.module.blocks[2], PassedBy)
    assert type(dense.module.blocks[1]) is Block
    assert isinstance(dense.module.blocks[1].conv1, PassedBy)
    assert type(dense.module.blocks[0].conv1) is nn.Conv2d


@pytest.mark.parametrize("closed", [("blocks.1",), ("blocks.0", "blocks.1")])
@pytest.mark.one_in(2)
def test_a_class_that_writes_into_what_is_gone_goes_on(closed, tmp_path):
    """``y += x`` needs zeros of the sum's shape: fewer positions than x has, and its channels."""
    model = gated(Net(writes=True), *closed)
    dense = l0prune.export(model)
    assert dense.rebuilt, dense.note
    assert type(dense.module.blocks[1]) is Block
    small = dense.module.blocks[1].bn2
    assert (small.dim, small.channels) == (1, dense.module.blocks[1].short.out_channels)
    assert small.channels < 16
    for side in (8, 7, 13):  # of no other size than the first one anything was proven
        x = torch.randn(2, 3, side, side)
        assert torch.allclose(model(x), dense.module(x), atol=1e-5)
    dense.save_pretrained(tmp_path / "small", code=True)
    again = l0prune.resize(Net(writes=True), tmp_path / "small").eval()
    assert torch.equal(again(X), dense.module.eval()(X))


def test_where_it_is_not_known_what_shape_that_had_it_is_a_graph_and_says_so():
    model = Net(writes=True)
    model.blocks[1].conv1.stride = 1
    model.blocks[1].relu = nn.MaxPool2d(2, ceil_mode=True)
    dense = l0prune.export(gated(model, "blocks.1"))
    assert not dense.rebuilt
    assert "the branch blocks.1 is gone, and its code computes that" in dense.note


class Named(nn.Module):
    """Keeps its sizes by names that what is left of it has, too."""

    def __init__(self):
        super().__init__()
        self.dim, self.channels, self.windows, self.at, self.results = 2, 5, "all", 7, [1]
        self.inner, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return self.last(F.relu(self.inner(x)))


class WithNamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.named, self.head = nn.Conv2d(3, 6, 1), Named(), nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.named(x)).mean((2, 3)))


def test_a_module_may_have_attributes_of_its_own_by_any_name(tmp_path):
    model = gated(WithNamed(), "named")
    dense = l0prune.export(model)
    assert dense.rebuilt, dense.note
    assert isinstance(dense.module.named, PassedBy)
    assert difference(model, dense, X) <= 1e-10
    dense.save_pretrained(tmp_path)
    again = l0prune.resize(WithNamed(), tmp_path).eval()
    assert torch.equal(again(X), dense.module(X))


class Table(nn.Module):
    """Gives numbers of its own, as relative positions do."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(1))

    def forward(self):
        return self.numbers.sigmoid()


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.last = (nn.Conv2d(n, 6, 1) for n in (3, 6, 6))
        self.table, self.head = Table(), nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.last(F.relu(self.inner(x)) * self.table())
        return self.head(x.mean((2, 3)))


def test_a_module_that_is_given_nothing_has_nothing_to_pass_on():
    model = gated(WithTable(), "last")
    dense = l0prune.export(model)
    assert dense.rebuilt, dense.note
    assert type(dense.module) is WithTable
    assert isinstance(dense.module.inner, PassedBy)
    assert type(dense.module.table) is Table
    assert difference(model, dense, X) <= 1e-10


class OfToken(nn.Module):
    """A block for one token that looks at all others, which come first."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, others, token):
        seen = torch.cat((token, others), 1).mean(1, keepdim=True)
        return token + self.down(F.gelu(self.up(seen)))


class WithToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 6), nn.Linear(6, 4)
        self.first, self.second = OfToken(), OfToken()

    def forward(self, x):
        others = F.relu(self.stem(x.mean(1)))
        token = others.amax(1, keepdim=True)
        return self.head(self.second(others, self.first(others, token=token))[:, 0])


@pytest.mark.parametrize("block", ["first", "second"])
def test_a_block_gives_back_what_it_would_have_added_to(block):
    model = gated(WithToken(), block)
    dense = l0prune.export(model)
    assert dense.rebuilt, dense.note
    assert isinstance(getattr(dense.module, block), PassedBy)
    assert difference(model, dense, X) <= 1e-10


class InWindows(nn.Module):
    """Mixes the channels of 2 x 2 windows, which are put together by code outside its modules."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x):
        rows, columns = x.shape[1] // 2, x.shape[2] // 2
        windows = self.norm(x).view(-1, rows, 2, columns, 2, x.shape[-1]).transpose(2, 3)
        mixed = self.mix(windows.reshape(-1, 4, x.shape[-1]))
        mixed = mixed.view(x.shape[0], rows, columns, 2, 2, mixed.shape[-1]).transpose(2, 3)
        return (x + mixed.reshape(x.shape)).tanh()  # so that it does not pass x through


class WithWindows(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 1), nn.Linear(6, 4)
        self.first, self.second = InWindows(), InWindows()

    def forward(self, x):
        x = F.relu(self.stem(x)).permute(0, 2, 3, 1)
        return self.head(self.second(self.first(x)).mean((1, 2)))


@pytest.mark.parametrize("block", ["first", "second"])
def test_code_that_puts_windows_together_is_given_zeros_of_their_shape(block):
    model = gated(WithWindows(), f"{block}.mix")
    dense = l0prune.export(model)
    assert dense.rebuilt, dense.note
    left = getattr(dense.module, block)
    assert isinstance(left, InWindows)
    assert isinstance(left.mix, PassedBy)
    assert difference(model, dense, X) <= 1e-10


def test_what_is_written_in_place_later_does_not_change_the_stream():
    """Without the branch the sum would be the stream itself, which ReLU then writes into."""

    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner, self.head = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x):
            x = self.stem(x)
            y = x + self.inner(x)
            return self.head(y.relu_() + 2 * x)

    model = gated(Reused(), "inner")
    assert branches_of(model) == ["inner"]
    dense = l0prune.export(model)
    assert difference(model, dense, X) <= 1e-10
    assert graph_difference(model, dense, X) <= 1e-10


@pytest.mark.slow
def test_what_nobody_closes_costs_what_it_did():
    closed, open_ = (l0prune.export(gated(Net(), *names)) for names in (("blocks.0",), ()))
    block = randomised(Net()).blocks[0]
    assert open_.params_before == closed.params_before
    assert closed.params <= open_.params - sum(bn.numel() for bn in block.bn2.parameters())


def test_by_name_or_glob_and_beside_axes():
    model = l0prune.gate(randomised(Net()), X, branches="blocks.[01]", include=["blocks.2.*"])
    kinds = {axis.name: axis.kind for axis in l0prune.gates(model).axes}
    assert [name for name, kind in kinds.items() if kind == "branch"] == ["blocks.0", "blocks.1"]
    assert all(name.startswith("blocks") for name in kinds)
    for wrong, text in (
        ({"branches": ["layer9"]}, "no branch of this model"),
        ({"branches": True, "keep_class": "native"}, "PassedBy"),
    ):
        with pytest.raises(UsageError, match=text):
            l0prune.gate(Net().eval(), X, **wrong)


def test_all_may_go():
    model = gated(Net(), "blocks.0", "blocks.1", "blocks.2")
    dense = l0prune.export(model)
    assert difference(model, dense, X) <= 1e-10
    assert operators(dense.program.graph_module)["conv2d"] == 2


@pytest.mark.slow
def test_files_bring_back_what_is_left(tmp_path):
    model = gated(Net(), "blocks.2", "blocks.1")
    dense = l0prune.export(model)
    dense.save_pretrained(tmp_path / "small", code=True)
    again = l0prune.resize(Net(), tmp_path / "small").eval()
    assert torch.equal(again(X), dense.module.eval()(X))
    assert sum(p.numel() for p in again.parameters()) == dense.params
    assert "PassedBy" in (tmp_path / "small" / "l0prune_model.py").read_text()


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
    dense = l0prune.export(model)
    assert operator not in operators(dense.program.graph_module)
    assert difference(model, dense, x) <= 1e-10


class Layer(nn.Module):
    """Of a DenseNet: it reads all that there is, and gives a little more."""

    def __init__(self, reads, gives):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(reads), nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(reads, 6, 1, bias=False)
        self.conv2 = nn.Conv2d(6, gives, 3, padding=1, bias=False)

    def forward(self, parts):
        y = self.conv1(F.relu(self.norm1(torch.cat(parts, 1))))
        return self.conv2(F.relu(self.norm2(y)))


class Dense(nn.Module):
    """Layers that read each other, two paths side by side, and a norm over all."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.layers = nn.ModuleList(Layer(5 + 4 * i, 4) for i in range(3))
        self.wide, self.small = nn.Conv2d(17, 6, 3, padding=1), nn.Conv2d(17, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(10), nn.Linear(10, 4)

    def forward(self, x):
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(parts))
        x = F.relu(torch.cat(parts, 1))
        x = torch.cat((self.wide(x), F.avg_pool2d(self.small(x), 3, 1, 1)), dim=1)
        return self.head(F.relu_(self.norm(x)).mean((2, 3)))


LAYERS = ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(
    "closed", [("layers.1",), ("layers.0", "layers.2"), (*LAYERS, "wide.branch")]
)
@pytest.mark.one_in(3)
def test_parts_of_concatenations_are_gone(closed, tmp_path):
    model = gated(Dense(), *closed)
    assert set(branches_of(model)) == {*LAYERS, "wide.branch"}
    dense = l0prune.export(model)
    assert difference(model, dense, X) <= 1e-10
    assert graph_difference(model, dense, X) <= 1e-10
    layers = 3 - len({*LAYERS} & {*closed})
    wide = int("wide.branch" not in closed)
    left = operators(dense.program.graph_module)
    assert left["conv2d"] == 1 + 2 * layers + wide + 1
    dense.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, dense, tmp_path / "model.onnx", X) <= 1e-5
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert Counter(node.op_type for node in graph.node)["Conv"] == left["conv2d"]
    assert all(len(node.input) > 1 for node in graph.node if node.op_type == "Concat")
    assert all(all(each.dims) for each in graph.initializer)
    assert {dense.widths[name] for name in closed} == {(0, 1)}
    assert dense.params == sum(p.numel() for p in dense.module.parameters())


@pytest.mark.slow
def test_a_class_goes_on_without_parts_of_concatenations():
    dense = l0prune.export(gated(Dense(), "layers.1", "wide.branch"))
    assert dense.rebuilt, dense.note
    assert type(dense.module) is Dense
    assert isinstance(dense.module.layers[1], PassedBy)
    assert isinstance(dense.module.wide, PassedBy)
    assert dense.module.layers[1]([torch.zeros(2, 5, 8, 8)]).shape == (0,)


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
    dense = l0prune.export(model)
    assert dense.gone == tuple(names[1:])
    assert difference(model, dense, X) <= 1e-10
    assert isinstance(dense.module.body.blocks[2], PassedBy)
    counted = sum(p.numel() for p in dense.module.parameters())
    assert counted == dense.params < sum(p.numel() for p in InParts().parameters())
    dense.save_onnx(tmp_path / "model.onnx")
    (body, *_) = sorted(tmp_path.glob("*body*.onnx"))
    convolutions = [n for n in onnx.load(body).graph.node if n.op_type == "Conv"]
    assert len(convolutions) == 1 + 2 + 1


def test_a_branch_of_a_part_that_code_around_it_reads_has_no_gate():
    names = [branch.name for branch in l0prune.survey(randomised(InParts(True)), X).branches]
    assert names == ["body.blocks.0", "body.blocks.1"]
