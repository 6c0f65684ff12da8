"""Times of layers from profiles: of nodes that the runtime fused, blocked and reordered."""

import pytest
import torch
from timed_network import gated

import l0prune
from l0prune.exporting.onnx.profile import FileNode, layers_of, profile_of, typical_call
from l0prune.exporting.onnx.times import one_example


def event(name, operator, us, shape=(1, 8, 4, 4), read=(1, 3, 4, 4)):
    shapes = {
        f"{side}_type_shape": [{"float": s}] for side, s in (("input", read), ("output", shape))
    }
    return {"cat": "Node", "name": name, "dur": us, "args": {"op_name": operator, **shapes}}


NODES = (
    FileNode("stem", "Conv", (), (8, 3, 3, 3)),
    FileNode("", "Relu", (0,)),
    FileNode("deep", "Conv", (1,), (8, 1, 3, 3), groups=8),
    FileNode("back", "Conv", (2,), (8, 8, 1, 1)),
    FileNode("", "Add", (3, 1)),
    FileNode("head", "Gemm", (4,), (5, 8), is_transposed=True),
)


def test_nodes_are_charged_to_the_layers_that_they_were_made_from():
    events = [
        event("ReorderInput_kernel_time", "ReorderInput", 5),
        event("n00001_0_nchwc_kernel_time", "Conv", 40),  # with the Relu, by whose name it goes
        event("n00002__kernel_time", "FusedConv", 30),
        event("n00004_0_nchwc_kernel_time", "Conv", 20),  # with the Add
        event("ReorderOutput_token_3_kernel_time", "ReorderOutput", 7),
        event("n00005__kernel_time", "Gemm", 2, (1, 5), (1, 8)),
    ]
    stem, deep, back, head = layers_of(events, NODES)
    assert [each.path for each in (stem, deep, back, head)] == ["stem", "deep", "back", "head"]
    assert (stem.ms, stem.reorders, stem.is_blocked) == (0.045, 0.005, True)
    assert (back.ms, back.reorders, back.is_blocked) == (pytest.approx(0.027), 0.007, True)
    assert (deep.operator, deep.is_depthwise, deep.is_blocked) == ("Conv", True, False)
    assert [each.work for each in (stem, deep, back, head)] == [16 * 8 * 27, 16 * 72, 16 * 64, 40]
    assert [each.widths for each in (stem, deep, back, head)] == [(3, 8), (8,), (8, 8)[:1], (8, 5)]


def test_nodes_of_one_operator_and_module_are_one_layer():
    nodes = (FileNode("a", "Mul"), FileNode("a", "Mul"), FileNode("b", "Mul"))
    events = [event(f"n{n:05d}__kernel_time", "Mul", 10, (1, 6)) for n in range(3)]
    first, second = layers_of(events, nodes)
    assert (first.path, first.ms, first.work, first.nodes, first.has_macs) == (
        "a",
        0.02,
        12,
        2,
        False,
    )
    assert (second.path, second.nodes) == ("b", 1)


def test_products_of_activations_count_their_macs():
    nodes = (FileNode("attention", "MatMul"),)
    (found,) = layers_of([event("n00000_", "MatMul", 9, (1, 2, 5, 5), (1, 2, 5, 8))], nodes)
    assert (found.work, found.has_macs, found.widths) == (2 * 5 * 5 * 8, True, ())


def test_a_typical_call_has_no_first_one_and_no_disturbed_ones():
    times = [900, 10, 70, 11, 10]
    events = [{"cat": "Session", "name": "load"}]
    for us in times:
        events += [event("n00000_", "Relu", us), event("n00001_", "Relu", 2 * us)]
    assert [each["dur"] for each in typical_call(events, 4)] == [10, 20]


@pytest.mark.slow
def test_layers_of_a_file_have_the_macs_of_the_plan(tmp_path):
    small = l0prune.export(gated())
    small.save_onnx(tmp_path / "model.onnx")
    given, _ = one_example(small.pieces[0])
    before = sorted(tmp_path.iterdir())
    found = profile_of(tmp_path / "model.onnx", given, 1, 0.1)
    assert sorted(tmp_path.iterdir()) == before
    assert sum(each.work for each in found if each.has_macs) == small.macs
    paths = {each.path for each in found if each.has_macs}
    assert paths == {"stem", "wide", "deep", "back", "side", "head"}
    (deep,) = (each for each in found if each.path == "deep")
    assert deep.is_depthwise
    assert torch.tensor([each.ms for each in found]).sum() > 0
