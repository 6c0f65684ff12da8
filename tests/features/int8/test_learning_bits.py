"""Bits that learn: that budgets are met, that runs go on, and that files have what was learned."""

import copy

import onnx
import onnxruntime
import pytest
import torch
from cut_networks import IMAGES, OPTIMIZERS, Residual, compare, gated
from resumed_run import SETTINGS, STEPS
from small_task import FEATURES, clouds, data, differing, tensors
from small_task import gated as small
from test_quantizing import run
from torch import nn

import l0prune
from l0prune.errors import DataError, Interrupted, UsageError
from l0prune.features.int8.learned_bits import LearnedBits
from l0prune.features.int8.trained import quantized
from l0prune.plan.measures import measure_of
from l0prune.running.task import Task

BITS = {**SETTINGS, "lam": None, "quantize": "bits", "bits": (0, 2, 4, 8), "start": "alike"}
BITS |= {"budget": "bops=0.02, params=0.8"}


@pytest.fixture(scope="module")
def whole():
    """A run without a stop."""
    return run(**BITS)


def share(model):
    gates = l0prune.gates(model)
    bops = measure_of(gates.plan, "bops")
    return bops.actual(gates.open()) / bops.dense()


def by_hand(model):
    """BOPs of the two Linears by the widths and bits that are left, over those of the whole."""
    gates = l0prune.gates(model)
    axes, bits = {axis.name: axis for axis in gates.axes}, gates.quantizer.bits
    inputs, inner = (int(axes[name].open.sum()) for name in ("0.in", "0"))
    first, second = (bits[f"{n}.weight.bits"] * bits[f"{n}.input.bits"] for n in ("0", "4"))
    return (inputs * inner * first + inner * 3 * second) / (1024 * (6 * 16 + 16 * 3))


def test_a_budget_in_bops_is_met_beside_another(whole):
    model, history, seen = whole
    assert seen[:2] == [False, False]
    assert all(seen[2:])
    assert share(model) <= 0.02
    assert history.last["params"] <= 0.8 * history.last["dense_params"]
    assert share(model) == pytest.approx(by_hand(model))
    assert history.last["bops"] / history.last["dense_bops"] == pytest.approx(share(model))
    assert history.last["error"] < 0.2
    assert bool(l0prune.gates(model).clips.ne(0).all())


@pytest.mark.slow
def test_a_price_of_bits_closes_them():
    given = {"lam": 0.0, "budget": None, "epochs": 2, "settle": 0.5, "gate_lr": 1.0}
    model, *_ = run(**{**BITS, **given, "bits_lam": 1.0})
    assert set(l0prune.gates(model).quantizer.bits.values()) == {2}
    free, *_ = run(**{**BITS, **given})
    assert sum(l0prune.gates(free).quantizer.bits.values()) > 4 * 2


@pytest.fixture(scope="module")
def file(whole, tmp_path_factory):
    """That run's model with 4/8 and 8/4 bits, its export, and the file of that in float32."""
    model = copy.deepcopy(whole[0]).eval()
    gates = l0prune.gates(model)
    for path, weight, read in (("0", 2, 3), ("4", 3, 2)):
        gates.set_open(f"{path}.weight.bits", range(weight))
        gates.set_open(f"{path}.input.bits", range(read))
    path = tmp_path_factory.mktemp("files") / "model.onnx"
    found = l0prune.export(model)
    found.save_onnx(path, opset=21)
    return model, found, onnx.load(path)


@pytest.mark.parametrize("opset", [20, 21])
def test_its_file_computes_what_was_learned(file, opset):
    """With opset 21 there are INT4 and INT16; before, bytes and float32."""
    model, found, in_float32 = file
    made = onnx.ModelProto()
    made.CopyFrom(in_float32)
    made.opset_import[0].version = opset
    names = {name for name, _ in found.module.named_parameters()}
    made = quantized(made, found.ranges, names)
    inputs = clouds(120, seed=1).inputs
    session = onnxruntime.InferenceSession(made.SerializeToString())
    (answers,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    with torch.no_grad():
        expected = model(inputs)
    off = (torch.from_numpy(answers) - expected).abs().amax(1) / expected.abs().max()
    # A sum that lies next to the middle of two numbers may be rounded either way.
    assert int((off > 1e-5).sum()) <= 2
    kinds = {tensor.data_type for tensor in made.graph.initializer}
    assert (onnx.TensorProto.INT4 in kinds) == (opset == 21)


def test_the_file_in_float32_has_weights_on_their_grids(file):
    _, found, _ = file
    bits = found.ranges.by_layer
    assert bits == {"0": (4, 8), "4": (8, 4)}
    for number, (path, (of_weight, _)) in enumerate(bits.items()):
        rows = found.module.get_submodule(path).weight.detach().double()
        ends = torch.tensor(found.ranges.bits.ends[number])[:, None]
        assert int(ends.max()) <= 2 ** (of_weight - 1) - 1
        whole_numbers = rows / rows.abs().amax(1, keepdim=True) * ends
        assert torch.allclose(whole_numbers, whole_numbers.round(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, STEPS * 2 + 3, STEPS * 4 + 2])
def test_a_run_that_was_stopped_goes_on_to_the_bit(whole, tmp_path, stop):
    expected, *_ = whole
    with pytest.raises(Interrupted):
        run(stop, out=tmp_path, **BITS)
    model, *_ = run(out=tmp_path, resume=True, **BITS)
    assert differing(tensors(expected), tensors(model)) == []


def test_a_cut_network_learns_what_the_masked_one_does():
    """Slots leave, and the bits of what stays are the same.

    Adam divides by gradients, and those of ranges of 16 bits are next to nothing but rounding.
    """
    model = gated(Residual(), (IMAGES,))
    l0prune.Pruner(model, steps=10, n=240, quantize="bits", budget="bops=0.1")
    gates = l0prune.gates(model)
    quantizer = gates.quantizer
    for name in ("stem.weight.bits", "head.1.input.bits"):
        gates.set_open(name, [0, 1])
    quantizer.is_on, quantizer.is_observing = False, True
    model.train()(IMAGES)
    quantizer.advance(quantizer.seen, quantizer.computed)
    quantizer.is_on, quantizer.is_observing = True, False
    gates.fixed = True
    assert quantizer.by_layer["stem"] == (4, 16)
    assert compare(model, IMAGES, OPTIMIZERS["sgd"]) == ""


def test_a_later_run_begins_with_the_bits_of_the_last_one(whole, tmp_path):
    l0prune.save(whole[0], tmp_path / "model.pt")
    model = l0prune.load(tmp_path / "model.pt")
    before = l0prune.gates(model).quantizer.bits
    l0prune.Pruner(model, steps=10, n=240, **{k: BITS[k] for k in ("quantize", "bits", "budget")})
    assert l0prune.gates(model).quantizer.bits == before
    l0prune.Pruner(model, steps=10, n=240, quantize="bits", bits=(0, 4, 8))
    bits = l0prune.gates(model).quantizer.bits
    assert set(bits.values()) == {8}
    l0prune.Pruner(model, steps=10, n=240, quantize="int8")
    gates = l0prune.gates(model)
    assert type(gates.quantizer) is not LearnedBits
    assert gates.clips is None
    assert gates.plan.slots == gates.plan.size == len(gates.log_alpha)


@pytest.mark.parametrize("budget", ["bops=0.1", "macs=2"])
def test_a_run_that_fails_leaves_the_model_without_it(budget):
    def loss(outputs, targets):
        raise RuntimeError("no loss")

    model = small()
    before, plan = model.state_dict().keys(), l0prune.gates(model).plan
    task = Task(clouds(), loss=loss, metric=None)
    with pytest.raises((DataError, UsageError)):
        l0prune.finetune(model, task, **{**BITS, "budget": budget})
    gates = l0prune.gates(model)
    assert gates.quantizer is None
    assert gates.plan is plan
    assert model.state_dict().keys() == before


def test_what_it_does_not_go_with_is_said():
    with pytest.raises(UsageError, match="in the place of these"):
        l0prune.finetune(small(), data(), quantize="bits", penalty="group-lasso", budget="bops=0.1")
    with pytest.raises(UsageError, match="is no menu"):
        l0prune.finetune(small(), data(), quantize="bits", bits=(2, 4))
    with pytest.raises(UsageError, match="bits must be a list of whole numbers, not '048'"):
        l0prune.finetune(small(), data(), quantize="bits", bits="048")


@pytest.mark.slow
def test_a_first_layer_alone():
    model = l0prune.gate(nn.Sequential(nn.Linear(FEATURES, 3)), torch.zeros(2, FEATURES))
    l0prune.Pruner(model, steps=10, n=240, quantize="bits", budget="bops=0.1")
    assert l0prune.gates(model).quantizer.bits == {"0.weight.bits": 16, "0.input.bits": 16}
