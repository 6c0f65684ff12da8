"""Batches that a program is for: any, two or more, or the example's alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from differences import as_graph, learned_on, run_onnx
from models import Broken, small
from networks import Fn
from round_trips import metadata
from torch import nn

import l0prune
from l0prune.capture.example_inputs import first_of
from l0prune.errors import UsageError


def another_way_for_one(m, x):
    h = torch.relu(m.a(x))
    return m.b(h * 2 if x.shape[0] == 1 else h)


def squeezed(m, x):
    return m.b(torch.relu(m.a(x))).squeeze()


def none_for_one(m, x):
    return m.b(torch.relu(m.a(x)) / x.std(0).mean())


def own_width(m, x):
    """A width that is computed with, for which the own class cannot stand in."""
    h = torch.relu(m.a(x))
    return m.b(h / h.shape[1] * (2 if x.shape[0] == 1 else 1))


def like_others(m, x):
    return m.b(torch.relu(m.a(x)).reshape(x.shape[0], -1))


def fixed(m, x):
    return m.b(torch.relu(m.a(x))) + torch.eye(int(m.c.shape[0]))[: x.shape[0], :1].expand(2, 3)


def exported(forward, batch=2):
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 3), "c": torch.randn(2, 1)}
    model = l0prune.gate(Fn(forward, **layers).eval(), torch.randn(batch, 4), exclude="*.in")
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return model, l0prune.export(model)


def batch_of(dense, folder):
    """What the metadata of its file says."""
    (file,) = dense.save_onnx(folder / "model.onnx")
    return metadata(file)["l0prune.batch"]


def compared(dense, kind):
    """The batches of these comparisons."""
    return {check.batch for check in dense.certificate.checks if check.what == kind}


@pytest.mark.parametrize("forward", [another_way_for_one, none_for_one, own_width])
@pytest.mark.one_in(3)
def test_a_program_that_is_wrong_for_one_example_is_for_two_or_more(forward, tmp_path):
    _, dense = exported(forward)
    assert dense.dynamic
    assert "batches of 2 or more" in dense.note
    assert batch_of(dense, tmp_path) == "2 or more"
    assert compared(dense, "onnx") == {2, 3}
    if not dense.rebuilt:  # the own class takes the model's own way for one example
        assert compared(dense, "graph") == {2, 3}
    assert dense.to_dict()["batches"] == ["2 or more"]
    with pytest.raises((RuntimeError, AssertionError)):
        dense.program.module()(torch.randn(1, 4))


class OverPlaces(nn.Module):
    """The dim that it squeezes besides is the batch of one example, and there in a file."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x).relu().mean((2, 3), keepdim=True).squeeze())


def test_a_file_that_keeps_the_dim_of_one_example_is_for_two_or_more(tmp_path):
    torch.manual_seed(0)
    model = l0prune.gate(OverPlaces().eval(), torch.randn(2, 1, 6, 6))
    dense = l0prune.export(model)
    assert "batches of 2 or more" in dense.note
    assert batch_of(dense, tmp_path) == "2 or more"
    assert compared(dense, "onnx") == {2, 3}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda module: module])
@pytest.mark.one_in(2)
def test_a_graph_that_is_wrong_for_one_example_refuses_it(way):
    model, dense = exported(own_width)
    module = way(dense.module)
    assert not dense.rebuilt
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), model(x))
    with pytest.raises(RuntimeError, match="measure 2 or more"):
        module(x[:1])


@pytest.mark.parametrize("renew", [False, True])
@pytest.mark.one_in(2)
def test_what_is_written_anew_is_for_two_or_more_too(renew, tmp_path):
    _, dense = exported(another_way_for_one)
    assert dense.rebuilt
    dense = learned_on(dense) if renew else dense
    assert batch_of(dense, tmp_path) == "2 or more"
    with pytest.raises((RuntimeError, AssertionError)):
        dense.program.module()(torch.randn(1, 4))


@pytest.mark.slow
def test_an_example_of_one_that_takes_a_way_of_its_own_is_what_the_program_is_for(tmp_path):
    model, dense = exported(another_way_for_one, batch=1)
    assert "batches of 1 only" in dense.note
    assert batch_of(dense, tmp_path) == "1 only"
    x = torch.randn(1, 4)
    torch.testing.assert_close(dense.program.module()(x), model(x))
    assert compared(dense, "onnx") == compared(dense, "program") == {1}


@pytest.mark.parametrize("forward", [like_others, squeezed])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.one_in(6)
def test_a_program_for_all_batches_is_tried_on_one_example(forward, batch, tmp_path):
    model, dense = exported(forward, batch)
    assert not dense.note
    assert batch_of(dense, tmp_path) == "1 or more"
    assert dense.program is not None
    kinds = {check.what for check in dense.certificate.checks}
    assert kinds in ({"class", "onnx", "program"}, {"graph", "class", "onnx"})
    assert all(compared(dense, kind) == {1, 2, 3} for kind in kinds)
    x = torch.randn(1, 4)
    torch.testing.assert_close(dense.program.module()(x), model(x))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.one_in(2)
def test_macs_are_those_of_one_example(batch):
    model = l0prune.gate(small().eval(), torch.randn(batch, 4))
    with as_graph():
        dense = l0prune.export(model)
    assert dense.macs_before == 4 * 8 + 8 * 4


def test_a_batch_that_is_fixed_is_said(tmp_path):
    _, dense = exported(fixed)
    assert not dense.dynamic
    assert "batches of 2 only" in dense.note
    assert batch_of(dense, tmp_path) == "2 only"


class InParts(Broken):
    """The first part goes another way with a single example."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b = Fn(lambda m, x: m.c[2](way(m, x)), c=small()), small()

    def layers(self):
        return self.a, self.b


def doubled_for_one(m, x):
    h = torch.relu(m.c[0](x))
    return h * 2 if x.shape[0] == 1 else h


def averaged_for_one(m, x):
    """The mean counts what was cut, but for several examples nobody takes one."""
    h = torch.relu(m.c[0](x))
    return h - h.mean(1, keepdim=True) if x.shape[0] == 1 else h


def nan_for_one(m, x):
    return torch.relu(m.c[0](x)) / x.std(0).mean()


def exported_in_parts(way):
    torch.manual_seed(0)
    model = l0prune.gate(InParts(way).eval(), torch.randn(3, 4))
    assert l0prune.gates(model).plan.parts == ("a", "b")
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return model, l0prune.export(model)


@pytest.mark.slow
def test_the_file_of_a_part_that_is_wrong_for_one_example_is_for_two_or_more(tmp_path):
    model, dense = exported_in_parts(doubled_for_one)
    assert dense.rebuilt
    assert "file of a are for batches of 2 or more" in dense.note
    x = torch.randn(1, 4)
    torch.testing.assert_close(dense.module(x), model(x))
    assert {c.batch for c in dense.certificate.checks if not c.part} == {1, 3}
    for each in map(learned_on, (dense, dense)):
        files = each.save_onnx(tmp_path / "model.onnx")
        assert [metadata(file)["l0prune.batch"] for file in files] == ["2 or more", "1 or more"]
        with pytest.raises((RuntimeError, AssertionError)):
            each.pieces[0].program.module()(x)


@pytest.mark.slow
def test_a_part_whose_class_is_wrong_for_one_example_becomes_a_graph_that_refuses_it():
    model, dense = exported_in_parts(averaged_for_one)
    assert "a is the captured graph" in dense.note
    x = torch.randn(3, 4)
    torch.testing.assert_close(dense.module(x), model(x))
    with pytest.raises(RuntimeError, match="has to measure 3"):
        dense.module(x[:1])


@pytest.mark.slow
def test_one_example_of_which_the_model_makes_nan_proves_nothing():
    _, dense = exported_in_parts(nan_for_one)
    assert dense.rebuilt
    assert not dense.note
    assert {check.batch for check in dense.certificate.checks} == {3}


def test_the_first_example_is_a_row_or_an_image_of_a_list():
    x, images = torch.randn(3, 4), [torch.randn(3, 8, 8), torch.randn(3, 6, 8)]
    (row,), named = first_of(((x,), {"mask": x > 0, "size": 3}))
    assert row.shape == named["mask"].shape == (1, 4)
    assert named["size"] == 3
    (alone, targets), _ = first_of(((images, [{}, {}]), {}))
    assert len(alone) == len(targets) == 1
    assert torch.equal(alone[0], images[0])


@dataclass
class Pair:
    """An input of a class of its own."""

    left: torch.Tensor
    right: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="test_free_batch.Pair")


@pytest.mark.slow
def test_the_batch_of_an_input_that_is_a_registered_dataclass_is_free(tmp_path):
    net = Fn(lambda m, x: m.out(torch.relu(m.a(x["pair"].left) * m.b(x["pair"].right))))
    net.a, net.b, net.out = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)
    example = {"pair": Pair(torch.randn(2, 6), torch.randn(2, 4))}
    l0prune.gate(net.eval(), (example,))
    small = l0prune.export(net)
    assert small.dynamic
    assert small.note == ""
    (file,) = small.save_onnx(tmp_path / "model.onnx")
    pair = Pair(torch.randn(5, 6), torch.randn(5, 4))
    (got,) = run_onnx(file, pair.left, pair.right)
    torch.testing.assert_close(got, net({"pair": pair}), rtol=1e-4, atol=1e-5)


def by_position(m, x):
    if not torch.compiler.is_exporting() or isinstance(x.shape[0], int):
        return m.b(torch.relu(m.a(x)))
    raise ValueError("rows are counted by hand here")


def test_what_torch_says_of_a_fixed_batch_is_the_reason():
    _, dense = exported(by_position)
    assert "batches of 2 only: torch.export says " in dense.note
    assert "rows are counted by hand here" in dense.note


@pytest.mark.slow
def test_free_sizes_of_a_registered_dataclass_are_a_list_of_its_fields(tmp_path):
    net = Fn(lambda m, pair: m.out(torch.relu(m.a(pair.left))) * pair.right)
    net.a, net.out = nn.Linear(6, 8), nn.Linear(8, 3)
    example = Pair(torch.randn(2, 5, 6), torch.randn(2, 5, 1))
    shapes = {"args": ([{1: "n"}, {1: "n"}],)}
    with pytest.raises(UsageError, match="dynamic_shapes has 1 entries for 'args', which holds 2"):
        l0prune.gate(net.eval(), (example,), dynamic_shapes={"args": ([{1: "n"}],)})
    l0prune.gate(net, (example,), dynamic_shapes=shapes)
    (file,) = l0prune.export(net).save_onnx(tmp_path / "model.onnx")
    pair = Pair(torch.randn(3, 7, 6), torch.randn(3, 7, 1))
    (got,) = run_onnx(file, pair.left, pair.right)
    torch.testing.assert_close(got, net(pair), rtol=1e-4, atol=1e-5)
