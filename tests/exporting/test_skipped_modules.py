"""How a class goes on of whose modules some have nothing left to compute."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from differences import difference
from made_weights import MADE_WEIGHTS
from torch import nn
from with_branches import Block, Net, X, gated

import l0prune
from l0prune.files.cut_layers import SkippedModule, are_passed


@pytest.mark.slow
def test_a_class_goes_on_without_them():
    small = l0prune.export(gated(Net(), "blocks.2", "blocks.1"))
    assert small.rebuilt, small.note
    assert type(small.module) is Net
    # Of the last block nothing is left; the second still has its shortcut.
    assert type(small.module.blocks[2]) is nn.Identity
    assert type(small.module.blocks[1]) is Block
    assert type(small.module.blocks[1].conv1) is nn.Identity
    assert isinstance(small.module.blocks[1].bn2, SkippedModule)
    assert type(small.module.blocks[0].conv1) is nn.Conv2d


def test_a_module_whose_hook_makes_its_weight_is_not_skipped():
    """The hook would divide nothing by its norm, for which torch ends the process."""
    module, shape, _ = MADE_WEIGHTS["weight_normed_stream_with_hooks"]
    small = l0prune.export(gated(copy.deepcopy(module), "blocks.0", x=torch.randn(shape)))
    assert not small.rebuilt
    assert "branch blocks.0 is gone" in small.note


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
    assert "SkippedModule" in (tmp_path / "small" / "l0prune_model.py").read_text()
    again = l0prune.resize(Net(writes=True), tmp_path / "small").eval()
    assert torch.equal(again(X), dense.module.eval()(X))


@pytest.mark.slow
def test_where_it_is_not_known_what_shape_that_had_it_is_a_graph_and_says_so():
    model = Net(writes=True)
    model.blocks[1].conv1.stride = 1
    model.blocks[1].relu = nn.MaxPool2d(2, ceil_mode=True)
    small = l0prune.export(gated(model, "blocks.1"))
    assert not small.rebuilt
    assert "the branch blocks.1 is gone, and its code computes that" in small.note


@pytest.mark.slow
def test_what_is_left_of_a_branch_writes_into_nothing_that_backward_needs():
    model = gated(Net(writes=True), "blocks.1")
    small = l0prune.export(model)
    assert isinstance(small.module.blocks[1].conv1, SkippedModule)
    slopes = []
    for each in (model, small.module.eval()):
        x = X.clone().requires_grad_()
        slopes += torch.autograd.grad(each(x).square().sum(), x)
    assert torch.allclose(*slopes, rtol=1e-4, atol=1e-6)


class Selective(nn.Module):
    """Two paths side by side that halve the picture, and a gate made of both, in place."""

    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleList(nn.Conv2d(8, 6, 3, 2, d, d) for d in (1, 2))
        self.gate, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 12, 1)
        self.short = nn.Conv2d(8, 12, 1, 2)

    def forward(self, x):
        first, second = (path(x) for path in self.paths)
        weight = self.gate((first + second).mean((2, 3), keepdim=True)).sigmoid()
        y = self.last(F.relu(first * weight + second * (1 - weight)))
        y += self.short(x)
        return y


class WithSelective(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, padding=1), Selective()
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(F.relu(self.block(F.relu(self.stem(x)))).mean((2, 3)))


@pytest.mark.slow
def test_paths_side_by_side_halve_the_picture_once():
    model = gated(WithSelective(), "block")
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert isinstance(small.module.block.last, SkippedModule)
    for side in (8, 7, 13):
        x = torch.randn(2, 3, side, side)
        assert torch.allclose(model(x), small.module(x), atol=1e-5)


class Fused(nn.Module):
    """Adds to what is small what two others of other sizes become."""

    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleList(
            nn.Sequential(*(nn.Conv2d(6, 6, 3, 2, 1) for _ in range(n))) for n in (1, 2)
        )

    def forward(self, small, middle, large):
        y = self.paths[0](middle) + self.paths[1](large) + small
        return y.tanh()  # so that it does not pass what is small through


class WithFused(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv2d(3, 6, 3, s, 1) for s in (4, 2, 1))
        self.fused, self.head = Fused(), nn.Linear(6, 4)

    def forward(self, x):
        y = self.fused(*(F.relu(stem(x)) for stem in self.stem))
        return self.head(y.mean((2, 3)))


def test_paths_side_by_side_both_give_zeros():
    model = gated(WithFused(), "fused.paths.0.0")  # of the sum of both
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert all(isinstance(path, SkippedModule) for path in small.module.fused.paths)
    for side in (8, 12):
        x = torch.randn(2, 3, side, side)
        assert torch.allclose(model(x), small.module(x), atol=1e-5)


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


@pytest.mark.slow
def test_a_module_may_have_attributes_of_its_own_by_any_name(tmp_path):
    model = gated(WithNamed(), "named")
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert isinstance(small.module.named, SkippedModule)
    assert difference(model, small, X) <= 1e-10
    small.save_pretrained(tmp_path)
    again = l0prune.resize(WithNamed(), tmp_path).eval()
    assert torch.equal(again(X), small.module(X))


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


@pytest.mark.slow
def test_a_module_that_is_given_nothing_has_nothing_to_pass_on():
    model = gated(WithTable(), "last")
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert type(small.module) is WithTable
    assert type(small.module.inner) is nn.Identity
    assert type(small.module.table) is Table
    assert difference(model, small, X) <= 1e-10


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
@pytest.mark.one_in(2)
def test_a_block_gives_back_what_it_would_have_added_to(block):
    model = gated(WithToken(), block)
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert isinstance(getattr(small.module, block), SkippedModule)
    assert difference(model, small, X) <= 1e-10


class Flattened(nn.Module):
    """A block that adds to a stream of rows, and gives them back their places."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return (rows + self.down(self.up(rows).relu())).view(x.shape)


def test_a_block_that_reshapes_and_shapes_back_gives_back_its_input():
    model = nn.Sequential(nn.Linear(6, 8), Flattened(), Flattened(), nn.Linear(8, 3)).eval()
    l0prune.gate(model, torch.randn(2, 5, 6))
    kinds = {axis.name: axis.kind for axis in l0prune.gates(model).plan.axes}
    switch = next(name for name, kind in kinds.items() if kind == "branch" and name[0] == "1")
    l0prune.gates(model).set_open(switch, [])
    small = l0prune.export(model, verify="float32")
    assert [type(each) for each in small.module[1:3]] == [nn.Identity, Flattened]


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
@pytest.mark.slow
def test_code_that_puts_windows_together_is_given_zeros_of_their_shape(block):
    model = gated(WithWindows(), f"{block}.mix")
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    left = getattr(small.module, block)
    assert isinstance(left, InWindows)
    assert isinstance(left.mix, SkippedModule)
    assert difference(model, small, X) <= 1e-10


class HandsOn(nn.Module):
    """An attention that computes a bias of positions where it is given none, and hands it on."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, scale=None, bias=None):
        if bias is None:
            bias = x.mean(-1, keepdim=True)
        return self.out(torch.tanh(self.inner(x)) + bias), bias, None


class WithBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList([HandsOn(), HandsOn(), HandsOn()])

    def forward(self, x):
        x, bias = torch.sigmoid(self.stem(x)), None
        for block in self.blocks:
            added, bias, _ = block(x, bias=bias)
            x = x + added
        return self.head(x)


def test_a_skipped_module_hands_on_what_it_was_given(tmp_path):
    torch.manual_seed(0)
    model, x = WithBias(), torch.randn(2, 5, 3)
    l0prune.gate(model, x, progress=False)
    l0prune.gates(model).set_open("blocks.1", [])
    small = l0prune.export(model, progress=False)
    assert small.rebuilt, small.note
    left = small.module.blocks[1]
    assert isinstance(left, SkippedModule)
    assert left.passed == ((1, 2, "bias"),)
    assert difference(model, small, x) <= 1e-10
    expected = small.module(x)
    file = io.BytesIO()
    torch.save(small.module, file)
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    assert not isinstance(plain.blocks[1], SkippedModule)
    assert torch.equal(plain(x), expected)
    assert torch.equal(plain.blocks[1](x, None, x)[1], x)
    small.save_pretrained(tmp_path)
    assert torch.equal(l0prune.resize(WithBias(), tmp_path).eval()(x), expected)


class AtLevel(nn.Module):
    """A branch that reads its input beside a position."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, at):
        return self.out(torch.tanh(self.inner(x + at)))


class WithLevels(nn.Module):
    """Rows of a table, by their numbers, that a branch alone needs."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(6, 4)
        self.levels = nn.Parameter(torch.randn(4, 6))
        self.block = AtLevel()

    def forward(self, x):
        x = torch.sigmoid(self.stem(x))
        at = torch.cat([self.levels[number].view(1, 1, -1) for number in range(4)], 1)
        return self.head(x + self.block(x, at))


def test_code_indexes_what_it_has_in_place_of_a_removed_parameter(tmp_path):
    torch.manual_seed(0)
    model, x = WithLevels(), torch.randn(2, 4, 3)
    l0prune.gate(model, x, progress=False)
    l0prune.gates(model).set_open("block", [])
    small = l0prune.export(model, progress=False)
    assert small.rebuilt, small.note
    assert "levels" not in dict(small.module.named_parameters())
    assert small.module.levels.untyped_storage().nbytes() == 4
    assert difference(model, small, x) <= 1e-10
    small.save_pretrained(tmp_path)
    assert torch.equal(l0prune.resize(WithLevels(), tmp_path).eval()(x), small.module(x))


@pytest.mark.parametrize(
    "value", [3, [[1, 2]], [[1, -1, "bias"]], [[1, 2, "a b"]], [[True, 2, "bias"]], [[1, 64, "x"]]]
)
def test_what_is_handed_on_is_checked_in_files(value):
    assert not are_passed(value)
    assert are_passed([[1, 2, "bias"]])
