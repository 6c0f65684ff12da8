"""Sizes of inputs that are free beside the batch, through the cut into programs and files."""

from __future__ import annotations

import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import as_graph, run_onnx
from networks import Fn, conv
from round_trips import through_pt2
from torch import nn
from torch.export import Dim

import l0prune
from l0prune.capture.capture import capture
from l0prune.capture.sizes import FreeSizes, free_sizes, named_inputs
from l0prune.errors import UsageError
from l0prune.exporting.onnx.times import one_example


class Skip(nn.Module):
    """A U-Net of one step, which takes images of even sides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 6), conv(6, 8, stride=2)
        self.up, self.out = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(12, 2, 1)

    def forward(self, image):
        a = self.a(image).relu()
        return {"mask": self.out(torch.cat([a, self.up(self.b(a).relu())], 1)), "features": a}


def cut(model, x, shapes):
    torch.manual_seed(0)
    l0prune.gate(randomise(model).eval(), x, dynamic_shapes=shapes)
    return close_some(model, seed=1), l0prune.export(model)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.one_in(2)
def test_an_image_of_any_size(is_graph, tmp_path):
    if is_graph:
        with as_graph():
            model, dense = cut(Skip(), torch.randn(2, 3, 8, 8), {"image": {2: "h", 3: "w"}})
    else:
        model, dense = cut(Skip(), torch.randn(2, 3, 8, 8), ({2: "h", 3: "w"},))
    assert dense.rebuilt is not is_graph
    assert is_graph or "size" not in dense.note
    (piece,) = dense.pieces
    assert piece.free.names == ("h", "w")
    assert len({answer.inputs[0][0].shape[2] for answer in piece.answers}) == 3
    file = tmp_path / "model.onnx"
    dense.save_onnx(file)
    graph = onnx.load(file).graph
    assert [output.name for output in graph.output] == ["mask", "features"]
    sizes = graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param or size.dim_value for size in sizes] == ["batch", 3, "h", "w"]
    program = through_pt2(dense.program)
    for height, width in ((8, 8), (14, 4), (6, 20)):
        image = torch.randn(3, 3, height, width)
        expected = model(image)
        written = dict(zip(("mask", "features"), run_onnx(file, image), strict=True))
        for name in expected:
            torch.testing.assert_close(dense.module(image)[name], expected[name])
            torch.testing.assert_close(program(image)[name], expected[name])
            torch.testing.assert_close(written[name], expected[name], rtol=1e-4, atol=1e-5)


class Pyramid(nn.Module):
    """Sums of features at two scales: of a side of 1 they are broadcast instead."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 6, stride=2), conv(6, 6, stride=2)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, image):
        fine = self.a(image).relu()
        coarse = nn.functional.interpolate(self.b(fine).relu(), scale_factor=2)
        return self.out((fine + coarse).tanh() + coarse)


def test_a_size_at_which_a_model_broadcasts(tmp_path):
    """Such sizes are not compared: the graph, and a file, take operands for equally large."""
    _, small = cut(Pyramid(), torch.randn(2, 3, 16, 16), ({2: "h", 3: "w"},))
    small.save_onnx(tmp_path / "net.onnx", time=False)
    sides = {tuple(answer.inputs[0][0].shape[2:]) for answer in small.pieces[0].answers}
    assert sides == {(16, 16), (32, 32)}


def test_a_text_of_any_length_with_its_mask():
    def forward(m, ids, mask):
        h = m.embed(ids) * mask[..., None]
        return m.out(torch.relu(m.a(h)).sum(1) / mask.sum(1, keepdim=True))

    net = Fn(forward, embed=nn.Embedding(9, 4), a=nn.Linear(4, 8), out=nn.Linear(8, 2))
    ids, mask = torch.randint(9, (2, 5)), torch.ones(2, 5)
    torch.manual_seed(0)
    shapes = {"ids": {1: Dim("length")}, "mask": (None, Dim("length"))}
    model = Named(net)
    l0prune.gate(randomise(model).eval(), (ids, mask), dynamic_shapes=shapes)
    small = l0prune.export(close_some(model, seed=1))
    (piece,) = small.pieces
    lengths = [answer.inputs[0][0].shape[1] for answer in piece.answers]
    assert sorted(lengths) == [1, 5, 10]
    assert [given.shape for given in one_example(piece)[0]] == [(1, 5), (1, 5)]  # what is timed
    assert all(a.inputs[0][1].shape == a.inputs[0][0].shape for a in piece.answers)
    assert {check.what for check in small.certificate.checks} == {"class", "program"}


class Named(nn.Module):
    """With names for its inputs, which ``Fn`` has not."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids, mask):
        return self.net(ids, mask)


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(40, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)).flatten(1))


def test_a_size_that_the_code_fixes_is_said_with_the_line():
    model, x, shapes = Fixed().eval(), torch.randn(2, 5, 6), {"x": {1: "length"}}
    said = l0prune.survey(model, x, dynamic_shapes=shapes).fixed
    assert list(said) == ["length"]
    assert said["length"].startswith(
        "length cannot be free, but 5 alone: the model's code fixes it at test_free_sizes.py:"
    )
    assert '"return self.b(torch.relu(self.a(x)).flatten(1))"' in said["length"]
    with pytest.raises(UsageError, match="length cannot be free") as caught:
        l0prune.gate(model, x, dynamic_shapes=shapes)
    assert str(caught.value) == said["length"]
    assert not hasattr(model, "l0prune_gates")


def added(m, x):
    return m.out(torch.relu(m.a(x)) + torch.zeros(2, 1, 1)).mean(1)


def counted(m, x):
    rows = len(x)
    return m.out(torch.relu(m.a(x)).view(rows, -1, 8)).mean(1)


def compared(m, x):
    if x.shape[0] > 3:
        return m.out(torch.relu(m.a(x))).sum(1)
    return m.out(torch.relu(m.a(x))).mean(1)


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (added, "return m.out(torch.relu(m.a(x)) + torch.zeros(2, 1, 1)).mean(1)"),
        (counted, "rows = len(x)"),
        (compared, "if x.shape[0] > 3:"),
    ],
)
@pytest.mark.slow
def test_a_batch_that_the_code_fixes_is_said_with_the_line(forward, line):
    net, x = Fn(forward, a=nn.Linear(6, 8), out=nn.Linear(8, 2)).eval(), torch.randn(2, 5, 6)
    said = l0prune.survey(net, x, dynamic_shapes={}).fixed
    assert said["batch"].startswith(
        "batch cannot be free, but 2 rows alone: the model's code fixes it at test_free_sizes.py:"
    )
    assert f'"{line}"' in said["batch"]
    assert not l0prune.survey(net, x).fixed  # that takes a capture more


def test_a_batch_that_the_code_does_not_fix():
    net, x = Fn(lambda m, x: m.a(x), a=nn.Linear(6, 8)).eval(), torch.randn(2, 5, 6)
    assert not l0prune.survey(net, x, dynamic_shapes={}).fixed


@pytest.mark.slow
def test_a_length_is_free_beside_a_batch_that_is_not(tmp_path):
    layers = {"a": nn.Linear(6, 8), "out": nn.Linear(8, 2)}
    shapes = {"args": ({1: "length"},)}
    model, dense = cut(Fn(added, **layers), torch.randn(2, 5, 6), shapes)
    (piece,) = dense.pieces
    assert piece.takes == "2 only"
    assert piece.free.names == ("length",)
    assert "batches of 2 only: the model's code fixes it at test_free_sizes.py:" in dense.note
    (file,) = dense.save_onnx(tmp_path / "model.onnx")
    for length in (1, 5, 9):
        x = torch.randn(2, length, 6)
        torch.testing.assert_close(dense.module(x), model(x))
        torch.testing.assert_close(run_onnx(file, x)[0], model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"y": {1: "n"}}, "names 'y', which is no input of the example; there are image"),
        ({"image": {4: "n"}}, "names dim 4 of 'image', which has 4 dims"),
        ({"image": {2: 2 * Dim("n")}}, "for a dim: give a name, a Dim, Dim.AUTO or None"),
        ({"image": {1: "n", 2: "n"}}, "n is 3 in one place of the example and 8 in another"),
    ],
)
def test_what_cannot_be_asked_for(shapes, text):
    net = Skip()
    with pytest.raises(UsageError, match=text):
        l0prune.gate(net, torch.randn(2, 3, 8, 8), dynamic_shapes=shapes)
    net.a = None  # a capture would find that its forward fails
    with pytest.raises(UsageError, match=text):
        l0prune.survey(net, torch.randn(2, 3, 8, 8), dynamic_shapes=shapes)


def test_inputs_have_the_names_that_further_keywords_give():
    def forward(x, **others):
        return x + others["y"]

    net, example = nn.Identity(), ((torch.ones(2, 3),), {"y": torch.ones(2, 3)})
    net.forward = forward
    assert named_inputs(net, example).keys() == {"x", "y"}
    assert free_sizes(net, example, {"y": {1: "n"}}).names == ("n",)


def test_a_size_of_one_says_nothing_about_others():
    net = nn.Sequential(conv(3, 8), conv(8, 2))
    with pytest.raises(UsageError, match="h is 1 in the example; to be free"):
        l0prune.gate(net, torch.randn(2, 3, 1, 8), dynamic_shapes=({2: "h"},))


def test_a_saved_model_keeps_what_is_free(tmp_path):
    model = Skip()
    l0prune.gate(model, torch.randn(2, 3, 8, 8), dynamic_shapes=({2: Dim.AUTO, 3: None},))
    l0prune.save(model, tmp_path / "m.gated.pt")
    again = l0prune.load(tmp_path / "m.gated.pt", trust_pickle=True)
    assert l0prune.gates(again).free == l0prune.gates(model).free
    assert l0prune.gates(again).free.names == ("image_2",)


class Positions(nn.Module):
    """Its table of positions is for so many whole patches, others are computed."""

    def __init__(self):
        super().__init__()
        self.patches, self.out = nn.Linear(12, 8), nn.Linear(8, 2)
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x):
        count = x.shape[1] // 2
        patches = self.patches(x[:, : 2 * count].reshape(x.shape[0], count, 12))
        if count == 4:
            return self.out(patches + self.table)
        return self.out(patches + torch.arange(count, device=x.device)[:, None])


@pytest.mark.slow
def test_a_size_that_is_free_between_two_patches_alone_counts_as_fixed():
    """torch.export calls it symbolic: 8 and 9 take the same way."""
    model, free = Positions().eval(), FreeSizes(({1: "length"},))

    def found(length):
        return capture(model, (torch.randn(2, length, 6),), dynamic_batch=True, free=free).free

    assert not found(8)
    assert found(6) == {"length"}
