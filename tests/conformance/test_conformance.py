"""Every network of the zoo, all the way: gates, a cut, files, what is read again, a second cut."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from deadness import close_some
from differences import (
    ROUNDED,
    changed,
    difference,
    graph_difference,
    learned_on,
    of_scale,
    onnx_difference,
    run_onnx,
    tensors,
)
from round_trips import metadata, through_pt2
from torch.nn.utils.parametrize import is_parametrized
from zoo import ZOO

import l0prune
from l0prune.errors import CaptureError, L0pruneError, NothingToPrune

CAN_BE_CUT = [name for name, each in ZOO.items() if not each.why]
EXACT = 1e-10
# An ε of the dtype.
FLOAT32 = {"rms_norm_of_tiny_values"}
# Others may have one slot left of each axis, no branch, or graphs of which nothing more can go.
AGAIN = {
    "mlp", "alibi", "picked_by_identity", "spectral_norm_by_hand", "pieces_of_weights",
    "multi_head_attention", "layer_norm_stream", "recurrent", "rms_norm", "tied_table_and_head",
}  # fmt: skip


def made(name):
    if name == "with_a_tangent" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 does not export a jvp")
    module, args = ZOO[name].made()
    if name in FLOAT32:
        return module.float(), tuple(x.float() for x in args)
    return module, args


def gated(name):
    """The network, its example, and its gates: about half of them closed, others in between."""
    model, args = made(name)
    return close_some(l0prune.gate(model, args)), args


def written(name, small, folder):
    """The ONNX file, or None of a network that torch does not write, which is said."""
    if ZOO[name].no_onnx:
        with pytest.raises(L0pruneError, match=ZOO[name].no_onnx):
            small.save_onnx(folder / "model.onnx")
        assert not list(folder.iterdir())
        return None
    (file,) = small.save_onnx(folder / "model.onnx")
    assert list(folder.iterdir()) == [file]
    return file


def same(first, second, args):
    with torch.no_grad():
        pairs = zip(tensors(first(*args)), tensors(second(*args)), strict=True)
        return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", [name for name, each in ZOO.items() if each.axes or each.why])
@pytest.mark.one_in(4)
def test_axes_are_those_one_expects(name):
    model, args = made(name)
    found = l0prune.survey(model, args, own_class=False)
    assert sorted(axis.size for axis in found.axes) == sorted(ZOO[name].axes or ())


@pytest.mark.parametrize("name", [name for name, each in ZOO.items() if each.why])
@pytest.mark.one_in(2)
def test_where_nothing_can_be_cut_the_reason_is_said(name):
    with pytest.raises(NothingToPrune, match=ZOO[name].why):
        l0prune.gate(*made(name))


@pytest.mark.parametrize("name", CAN_BE_CUT)
@pytest.mark.one_in(64)
def test_gates_are_cut_written_read_and_cut_again(name, tmp_path):
    plain, _ = made(name)
    limit = ROUNDED if name in FLOAT32 else EXACT
    model, args = gated(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    small = l0prune.export(model)
    after = model.state_dict()
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())
    # A parameter of a branch that is gone, which its class still reads, is a zero of one slot.
    state = dict(small.module.named_parameters(remove_duplicate=False))
    names = small.program.graph_signature.parameters if small.gone else list(state)
    assert small.params == sum(p.numel() for p in {state[n] for n in names if n in state})
    assert small.params < small.params_before
    assert difference(model, small, args) <= limit
    assert graph_difference(model, small, args) <= limit

    if (file := written(name, small, tmp_path)) is not None:
        assert onnx_difference(model, small, file, args) <= 1e-5
        assert json.loads(metadata(file)["l0prune.certificate"]) == small.certificate.to_dict()
    assert small.note or {check.batch for check in small.certificate.checks} == {1, 2, 3}
    assert same(copy.deepcopy(model), model, args)
    assert same(copy.deepcopy(small.module), small.module, args)
    if not any(map(is_parametrized, plain.modules())):  # torch pickles none of these
        l0prune.save(model, tmp_path / "gated.pt")
        loaded = l0prune.load(tmp_path / "gated.pt", copy.deepcopy(plain))
        assert same(loaded.eval(), model, args)
    if small.rebuilt:
        small.save(tmp_path / "state.safetensors")
        assert same(l0prune.resize(plain, tmp_path / "state.safetensors"), small.module, args)

    try:
        again = close_some(l0prune.gate(copy.deepcopy(small.module), args), seed=1)
    except NothingToPrune:
        assert name not in AGAIN
        return
    second = l0prune.export(again)
    assert second.params <= second.params_before == small.params
    assert difference(again, second, args, may_vanish=True) <= limit


@pytest.mark.parametrize("name", [name for name in CAN_BE_CUT if ZOO[name].rows != (3,)])
@pytest.mark.slow
def test_programs_and_files_take_any_number_of_examples(name, tmp_path):
    model, args = gated(name)
    small = l0prune.export(model)
    file = written(name, small, tmp_path)
    program = through_pt2(small.program)
    for rows in ZOO[name].rows:
        given, _ = changed((args, {}), rows)
        with torch.no_grad():
            expected = tensors(model(*given))
            ways = [small.module(*given), program(*given)]
            ways += [run_onnx(file, *given)] if file else []
        for found in ways:
            for ours, theirs in zip(expected, tensors(found), strict=True):
                assert of_scale(ours, theirs) <= 1e-5


@pytest.mark.parametrize("name", CAN_BE_CUT)
@pytest.mark.one_in(60)
def test_closed_branches_and_closed_slots_together_are_exact(name):
    limit = ROUNDED if name in FLOAT32 else EXACT
    module, args = made(name)
    l0prune.gate(module, args)
    bank = l0prune.gates(module)
    branches = [axis.slice.start for axis in bank.axes if axis.kind == "branch"]
    for gone in {(), *((place,) for place in branches), tuple(branches)}:
        close_some(module, len(gone) + sum(gone), closed=0.3)
        with torch.no_grad():
            bank.log_alpha[branches] = 3.0
            bank.log_alpha[list(gone)] = -5.0
        small = l0prune.export(module)
        assert len(small.gone) >= len(gone)
        assert difference(module, small, args) <= limit
        assert graph_difference(module, small, args) <= limit


@pytest.mark.parametrize("name", CAN_BE_CUT)
@pytest.mark.one_in(180)
def test_what_has_learned_on_is_written_as_it_is_now(name, tmp_path):
    model, args = gated(name)
    first = l0prune.export(model)
    params, widths = first.params, first.widths
    renewed = learned_on(first)
    assert (renewed.params, renewed.widths) == (params, widths)
    with torch.no_grad():
        expected = tensors(renewed.module.eval()(*args))
        file = written(name, renewed, tmp_path)
        renewed.save(tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2").module()
        for found in filter(None, (file and run_onnx(file, *args), tensors(program(*args)))):
            for ours, theirs in zip(expected, found, strict=True):
                assert of_scale(ours, theirs) <= 1e-5
    renewed.save(tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)["state_dict"]
    assert {key for key, _ in renewed.module.named_parameters()} <= state.keys()
    for key, tensor in renewed.module.state_dict().items():
        assert key not in state or torch.equal(state[key], tensor)


@pytest.mark.parametrize("name", CAN_BE_CUT)
@pytest.mark.slow
def test_torch_compiles_what_is_gated_and_what_is_cut(name):
    model, args = gated(name)
    small = l0prune.export(model).module
    for each in (model, small):
        torch._dynamo.reset()
        with torch.no_grad():
            found = torch.compile(each, backend="eager")(*args)
            for ours, theirs in zip(tensors(each(*args)), tensors(found), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_an_output_that_torch_cannot_take_apart_is_named():
    class Own:
        def __init__(self, tensor):
            self.tensor = tensor

    module = torch.nn.Linear(3, 8)
    module.register_forward_hook(lambda module, args, output: Own(output))
    with pytest.raises(CaptureError, match=r"Own.*register a pytree"):
        l0prune.survey(module, (torch.randn(2, 3),))
