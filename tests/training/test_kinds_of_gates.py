"""Every kind of gate through the whole of it: gate, finetune, save, export."""

import signal

import pytest
import torch
from differences import run_onnx
from resumed_run import EPOCHS, SETTINGS, STEPS, task
from small_task import data, differing, gated, tensors

import l0prune
from l0prune.errors import Interrupted, TrainingError, UsageError
from l0prune.running.task import Task, cross_entropy
from l0prune.training.run import finetune

KINDS = [
    l0prune.HardConcrete(),
    l0prune.ContinuousSparsification(),
    l0prune.BinaryConcrete(),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
annealed = l0prune.ContinuousSparsification()


def measured(history):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in history.records]


@every_kind
@pytest.mark.slow
def test_it_prunes_and_the_export_computes_the_same(tmp_path, kind):
    model = gated(kind)
    before = model.eval()(data().test.inputs)
    settings = {"epochs": 25, "batch_size": 30, "lam": "1/N", "lr": 1e-2, "ema": 0.9}
    history = finetune(model, data(), progress=False, **settings)
    bank = l0prune.gates(model)
    assert bank.gate == kind.at(1)
    assert history.last["params"] < 0.8 * history.last["dense_params"]
    assert history.last["error"] < 0.1

    l0prune.save(model, tmp_path / "tuned.pt")
    again = l0prune.load(tmp_path / "tuned.pt")
    assert l0prune.gates(again).gate == kind.at(1)
    x = data().test.inputs
    wanted = model.eval()(x)
    assert torch.equal(again.eval()(x), wanted)
    assert not torch.allclose(wanted, before)

    small = l0prune.export(model)
    assert sum(p.numel() for p in small.module.parameters()) == history.last["params"]
    torch.testing.assert_close(small.module(x), wanted, rtol=1e-5, atol=1e-5)
    small.save_onnx(tmp_path / "small.onnx")
    (y,) = run_onnx(tmp_path / "small.onnx", x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def run(folder, *stop, resume=False, testing=False):
    model = gated(annealed, dropout=0.3)
    source = task("split", *stop, testing=testing)
    return model, finetune(model, source, out=folder, resume=resume, **SETTINGS)


@pytest.mark.slow
def test_going_on_while_the_gate_anneals_changes_nothing(tmp_path):
    model, history = run(tmp_path / "whole")
    stops = [(2, False), (STEPS, False), (2 * STEPS + 3, False), (3 * STEPS, True),
             (EPOCHS * STEPS - 12, False)]  # fmt: skip
    for step, testing in stops:
        folder = tmp_path / f"{step}"
        with pytest.raises(Interrupted):
            run(folder, step, signal.SIGINT, testing=testing)
        again, records = run(folder, resume=True)
        assert differing(tensors(model), tensors(again)) == []
        assert measured(records) == measured(history)
        assert l0prune.gates(again).gate == l0prune.gates(model).gate == annealed.at(1)


def test_the_gate_stands_where_the_run_was_left(tmp_path):
    learning = EPOCHS * STEPS - round(SETTINGS["settle"] * STEPS)
    model = gated(annealed)
    with pytest.raises(Interrupted):
        finetune(model, task("split", 9, signal.SIGINT), **SETTINGS)
    assert l0prune.gates(model).gate == annealed.at(10 / learning)  # the step under way is done


def test_a_run_goes_on_with_its_own_gate_only(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 9, signal.SIGINT)
    other = gated(l0prune.ContinuousSparsification(final_beta=100), dropout=0.3)
    with pytest.raises(UsageError, match=r"other settings: gate .*200.*→.*100"):
        finetune(other, task("split"), out=tmp_path, resume=True, **SETTINGS)


def test_a_run_that_fails_leaves_the_gate_as_found():
    def loss(outputs, targets):
        return cross_entropy(outputs, targets) * float("nan" if torch.is_grad_enabled() else 1)

    found = annealed.at(0.7)
    model = gated(found)
    before = tensors(model)
    with pytest.raises(TrainingError):
        finetune(model, Task(data().train, loss=loss), **SETTINGS)
    assert l0prune.gates(model).gate == found
    assert differing(before, tensors(model)) == []
