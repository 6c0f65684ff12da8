"""Training that knows of eight bits: when it does, and that cuts and stops change nothing of it."""

import signal

import pytest
import torch
from cut_networks import IMAGES, OPTIMIZERS, Residual, compare, gated
from resumed_run import SETTINGS, STEPS
from small_task import clouds, data, differing, tensors
from small_task import gated as small
from torch import nn
from torch.nn.functional import cross_entropy

import l0prune
from l0prune.errors import DataError, Interrupted, UsageError
from l0prune.exporting.capture_parts import surveyed
from l0prune.exporting.network import copies_of
from l0prune.features.int8.fake_quantizer import FakeQuantizer
from l0prune.features.int8.layers import quantized_layers
from l0prune.gating.attaching import holder
from l0prune.running.task import Task

INT8 = {**SETTINGS, "quantize": "int8"}
TOTAL = SETTINGS["epochs"] * STEPS


def watched(seen, stop=None):
    """The task, of which each step notes whether it is quantized; a signal comes before one."""

    def loss(outputs, targets):
        if torch.is_grad_enabled():
            seen.append(l0prune.gates(seen[0]).quantizer.is_on)
            if len(seen) == (stop or -2) + 2:
                signal.raise_signal(signal.SIGTERM)
        return cross_entropy(outputs, targets)

    return Task(clouds(), clouds(120, seed=1), loss=loss, metric="error")


def run(stop=None, **settings):
    model = small()
    seen = [model]
    history = l0prune.finetune(model, watched(seen, stop), **{**INT8, **settings})
    return model, history, seen[1:]


@pytest.fixture(scope="module")
def whole():
    """A run without a stop."""
    return run()


def test_it_is_on_from_the_middle_and_while_settling(whole):
    model, history, seen = whole
    assert seen == [step >= TOTAL // 2 for step in range(TOTAL)]
    quantizer = l0prune.gates(model).quantizer
    assert quantizer.is_on
    assert not quantizer.is_observing
    assert quantizer.counts == [TOTAL - TOTAL // 4] * 2
    model.eval()
    test = clouds(120, seed=1)
    with torch.no_grad():
        quantized = cross_entropy(model(test.inputs), test.targets)
    assert float(quantized) == pytest.approx(history.last["test_loss"], rel=1e-5)
    settled = run(epochs=2, settle=1.25, compact="never")[2]
    assert settled == [step >= 2 * STEPS - 10 for step in range(2 * STEPS)]


@pytest.mark.slow
def test_weights_that_learn_alone_know_it_from_the_start():
    freely = dict.fromkeys(("lam", "gate_lr", "warmup", "settle"))
    model, _, seen = run(learn=False, epochs=1, compact="never", **freely)
    assert all(seen)
    assert l0prune.gates(model).quantizer.counts == [STEPS] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stop", [TOTAL - 5, TOTAL // 2 - 3])  # after a cut, and before it is on
def test_a_run_that_was_stopped_goes_on_to_the_bit(whole, tmp_path, stop):
    expected, records, _ = whole
    with pytest.raises(Interrupted):
        run(stop, out=tmp_path)
    model, history, _ = run(out=tmp_path, resume=True)
    assert differing(tensors(expected), tensors(model)) == []
    one, other = (l0prune.gates(each).quantizer for each in (expected, model))
    assert torch.equal(one.ranges, other.ranges)
    assert [r["test_loss"] for r in history.records] == [r["test_loss"] for r in records.records]


@pytest.mark.slow
def test_a_cut_network_learns_what_the_masked_one_does():
    model = gated(Residual(), (IMAGES,))
    root, gates = holder(model)
    (part,) = surveyed(copies_of(model), frees_batch=False).found
    quantizer = FakeQuantizer(gates, quantized_layers(part.analysis.captured, root), 127)
    assert [layer.path for layer in quantizer.scheme.layers] == [
        "stem", "branch.2", "branch.5", "head.1", "head.4",
    ]  # fmt: skip
    quantizer.attach(root)
    quantizer.is_observing = True
    model(IMAGES)
    quantizer.advance(quantizer.seen, quantizer.computed)
    quantizer.is_observing, quantizer.is_on = False, True
    assert compare(model, IMAGES, OPTIMIZERS["adam"]) == ""


def test_a_run_that_fails_leaves_the_model_without_it():
    model = small()

    def loss(outputs, targets):
        raise RuntimeError("no loss")

    with pytest.raises(DataError, match="no loss"):
        l0prune.finetune(model, Task(clouds(), loss=loss, metric=None), **INT8)
    assert l0prune.gates(model).quantizer is None
    assert not any(module._forward_pre_hooks for module in model.modules() if module is not model)


def test_a_run_without_it_takes_it_off():
    model = small()
    l0prune.Pruner(model, steps=10, n=240, quantize="int8")
    assert l0prune.gates(model).quantizer is not None
    l0prune.Pruner(model, steps=10, n=240)
    assert l0prune.gates(model).quantizer is None


def test_in_a_loop_of_ones_own():
    model = small()
    pruner = l0prune.Pruner(model, steps=10, n=240, settle=3, gate_lr=2.0, quantize="int8")
    optimizer, inputs = torch.optim.Adam(pruner.param_groups(lr=1e-3)), clouds().inputs
    on = []
    for _ in range(10):
        on.append(l0prune.gates(model).quantizer.is_on)
        model(inputs).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
    assert on == [False] * 5 + [True] * 5


@pytest.mark.parametrize("setting", [{"compile": True}, {"distributed": "fsdp"}])
def test_what_it_does_not_go_with_is_said(setting):
    with pytest.raises(UsageError, match="leave compile out"):
        l0prune.finetune(small(), data(), quantize="int8", **setting)


def test_a_model_without_such_layers_is_said():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(6, 9)), nn.Parameter(torch.ones(9, 2))

        def forward(self, x):
            return torch.relu(x @ self.first) @ self.second

    model = l0prune.gate(Products(), torch.zeros(2, 6))
    with pytest.raises(UsageError, match="no Linear and no convolution"):
        l0prune.Pruner(model, steps=10, n=240, quantize="int8")
