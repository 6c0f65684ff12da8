"""Files in which blocks that input gates close are not computed."""

import numpy as np
import onnx
import pytest
import torch
from input_gated import IMAGES, POINTS, images, points
from onnx import numpy_helper

import l0prune
from l0prune.errors import L0pruneError, UsageError
from l0prune.exporting.onnx.file import Session

MAKE = {"points": (points, POINTS), "images": (images, IMAGES)}


def exported(make, x, **kwargs):
    """An export of a network of which each input closes some blocks."""
    model = make(**kwargs)
    with torch.no_grad():
        for gate in model.gates if kwargs.get("skip", True) else ():
            handle = gate.whole.register_forward_hook(centred)
            model(x)
            handle.remove()
        gates = l0prune.gates(l0prune.gate(model, (x,), branches=False))
        noise = torch.randn(gates.log_alpha.shape, generator=torch.Generator().manual_seed(5))
        gates.log_alpha.add_(2 * noise)
    return model, l0prune.export(model)


def centred(layer, _, out):
    """Let a gate be closed for about half of a batch."""
    layer.weight.mul_(5)
    layer.bias.sub_(5 * (out - layer.bias).median() + layer.bias + 0.1)


def ifs(path):
    return [node for node in onnx.load(path).graph.node if node.op_type == "If"]


def side(node, name):
    return next(attribute.g for attribute in node.attribute if attribute.name == name)


CASES = [
    pytest.param("images", None),
    pytest.param("points", None, marks=pytest.mark.slow),
    pytest.param("images", l0prune.BinaryConcrete(), marks=pytest.mark.slow),
    pytest.param("points", l0prune.BinaryConcrete(), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.one_in(4)
def test_blocks_are_in_an_if_and_the_file_computes_the_same(name, kind, tmp_path):
    make, x = MAKE[name]
    model, dense = exported(make, x, gate=kind)
    file = l0prune.save_skipping(dense, tmp_path / "skip.onnx")
    found = ifs(file)
    assert len(found) == len(model.blocks)
    assert input_names(file) == ["points" if name == "points" else "input"]
    layer = "Conv" if name == "images" else "Gemm"
    inside = [[n.op_type for n in side(each, "then_branch").node].count(layer) for each in found]
    assert inside == [3 if name == "points" else 2] * len(found)  # one of a gate's is a Gemm, too
    known = {n.op_type for each in found for n in side(each, "else_branch").node}
    assert known <= {"Constant", "Expand"}
    for row in x:
        (answer,) = Session(str(file))([row[None]])
        assert torch.allclose(answer, model(row[None]), atol=1e-5)
    facts = {each.key: each.value for each in onnx.load(file).metadata_props}
    assert facts["l0prune.skips"] == str(len(found))
    assert facts["l0prune.batch"].startswith("1 only")
    for text in ("all left out", "none left out"):
        assert text in facts["l0prune.certificate"]
    with pytest.raises(L0pruneError):
        Session(str(file))([x])


@pytest.mark.slow
def test_what_is_left_out_is_not_computed(tmp_path):
    model, dense = exported(points, POINTS)
    file = l0prune.save_skipping(dense, tmp_path / "skip.onnx")
    broken = onnx.load(file)
    for number, node in enumerate(n for n in broken.graph.node if n.op_type == "If"):
        for weight in side(node, "then_branch").initializer if number == 1 else ():
            nothing = numpy_helper.to_array(weight) * np.float32("nan")
            weight.CopyFrom(numpy_helper.from_array(nothing, weight.name))
    session, is_closed = Session(broken.SerializeToString()), []
    handle = model.gates[1].whole.register_forward_hook(
        lambda _, __, out: is_closed.append(bool(model.gates[1].gate.estimate(20 * out) == 0))
    )
    for row in POINTS:
        expected = model(row[None])
        (answer,) = session([row[None]])
        assert bool(answer.isnan().any()) is not is_closed[-1]
        if is_closed[-1]:
            assert torch.allclose(answer, expected, atol=1e-5)
    handle.remove()
    assert set(is_closed) == {True, False}


@pytest.mark.slow
def test_without_gates_of_blocks_there_is_nothing_to_leave_out(tmp_path):
    _, dense = exported(points, POINTS, skip=False)
    with pytest.raises(UsageError, match="no block of this network can be left out"):
        l0prune.save_skipping(dense, tmp_path / "skip.onnx")
    assert not (tmp_path / "skip.onnx").exists()


def input_names(path):
    return [each.name for each in onnx.load(path).graph.input]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:l0prune. exit")
def test_exits_on_a_network_with_input_gates(tmp_path):
    """All three files compute what the gated model does, and have the user's name of the input."""
    model = l0prune.add_exits(points(), (POINTS,), at=1)
    gates = l0prune.gates(l0prune.gate(model, (POINTS,), branches=False))
    with torch.no_grad():
        noise = torch.randn(gates.log_alpha.shape, generator=torch.Generator().manual_seed(5))
        gates.log_alpha.add_(2 * noise)
    small = l0prune.export(model.eval())
    (plain,) = small.save_onnx(tmp_path / "plain.onnx")
    skipping = l0prune.save_skipping(small, tmp_path / "skip.onnx")
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    held_out = [(x, model(x).logits.argmax(1))]
    early = l0prune.choose_exits(small, held_out, budget="macs=0.9")
    left = early.save_onnx(tmp_path / "early.onnx")
    assert input_names(plain) == input_names(skipping) == input_names(left) == ["points"]
    exits = set()
    for row in x[:20]:
        wanted = model(row[None])
        for file in (plain, skipping):
            for answer, of in zip(
                Session(str(file))([row[None]]), (wanted[0], *wanted[1]), strict=True
            ):
                assert torch.allclose(answer, of, atol=1e-5)
        answer, number, _ = Session(str(left))([row[None]])
        exits.add(int(number))
        assert torch.allclose(answer, [*wanted[1], wanted[0]][int(number)], atol=1e-5)
    assert exits == {0, 1}


@pytest.mark.slow
def test_the_plain_file_has_the_name_of_the_users_argument(tmp_path):
    _, dense = exported(points, POINTS)
    (plain,) = dense.save_onnx(tmp_path / "plain.onnx")
    assert input_names(plain) == ["points"]
    assert torch.equal(dense.module(points=POINTS), dense.module(POINTS))
