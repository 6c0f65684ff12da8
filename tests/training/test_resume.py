import json
import os
import signal

import pytest
import torch
from processes import exit_codes
from resumed_run import EPOCHS, SETTINGS, STEPS, run, task
from small_task import data, differing, gated, network, tensors
from torch.nn.functional import cross_entropy

import l0prune
from l0prune.data import Data, Tensors
from l0prune.errors import FileError, Interrupted, TrainingError, UsageError
from l0prune.running.evaluate import evaluate
from l0prune.running.task import Task
from l0prune.training import checkpoint
from l0prune.training.compaction import Compaction
from l0prune.training.run import finetune, train_dense

KINDS = ["split", "loader", "own generator", "budget"]
SETTLES = EPOCHS * STEPS - 12
STOPS = {
    2: signal.SIGINT,  # λ is rising
    STEPS: signal.SIGTERM,  # between two epochs
    2 * STEPS + 3: signal.SIGINT,
    SETTLES: signal.SIGINT,  # the first step of settling
    EPOCHS * STEPS - 1: signal.SIGTERM,  # the last of all
}
# By default each stop comes once, and each kind of data sees both signals; what has most to
# remember sees one more.
COVER = set(zip([*KINDS, "budget"], STOPS, strict=True)) | {
    ("split", STEPS), ("own generator", EPOCHS * STEPS - 1), ("budget", STEPS),
}  # fmt: skip


def kinds(*default):
    """A test for each kind of data; by default only for some."""
    return pytest.mark.parametrize(
        "whole",
        [pytest.param(k, marks=() if k in default else pytest.mark.slow) for k in KINDS],
        indirect=True,
    )


def measured(history):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in history.records]


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """A kind of data, and what a run without a stop came to on it."""
    folder = tmp_path_factory.mktemp("whole")
    model, history = run(folder, request.param)
    return request.param, tensors(model), measured(history)


def test_kill_9_and_go_on_is_the_same_to_the_bit(tmp_path):
    stop = SETTLES + 1  # in the middle of epoch 4, between a cut and its first checkpoint
    assert exit_codes([(run, tmp_path, "loader", stop, signal.SIGKILL)]) == [-signal.SIGKILL]
    assert checkpoint.read(tmp_path).epoch == 3
    model, history = run(tmp_path, "loader", resume=True)
    expected, records = run(tmp_path / "whole", "loader")
    assert differing(tensors(expected), tensors(model)) == []
    assert measured(history) == measured(records)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("whole", "step"),
    [
        pytest.param(k, s, marks=() if (k, s) in COVER else pytest.mark.slow)
        for k in KINDS
        for s in STOPS
    ],
    indirect=["whole"],
)
@pytest.mark.one_in(5)
def test_a_stop_between_two_steps_changes_nothing(whole, tmp_path, step):
    kind, expected, records = whole
    number = STOPS[step]
    with pytest.raises(Interrupted, match="resume=True goes on from there") as caught:
        run(tmp_path, kind, step, number)
    assert caught.value.signal == number
    state = checkpoint.read(tmp_path)
    assert state.epoch * STEPS + state.step == step + 1  # the step under way is done
    # match needs the whole network; every other run is cut when its gates begin to stand
    assert (state.pruner["cut"]["kept"] is not None) == (step >= SETTLES and kind != "budget")
    model, history = run(tmp_path, kind, resume=True)
    assert differing(expected, tensors(model)) == []
    assert measured(history) == records


def test_compact_may_change_on_the_way(monkeypatch, tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, "split", SETTLES + 2, signal.SIGINT)
    assert checkpoint.read(tmp_path).pruner["cut"]["kept"] is not None
    begun = []
    monkeypatch.setattr(Compaction, "begin", lambda *_, **__: begun.append(1))
    settings = {**SETTINGS, "out": tmp_path, "resume": True}
    history = finetune(gated(dropout=0.3), task("split"), **settings, compact="never")
    assert begun == []
    assert len(history.records) == EPOCHS


def test_a_dense_run_goes_on_whatever_it_noted_of_gates(tmp_path):
    settings = {"epochs": 2, "progress": False, "out": tmp_path}
    model = network()
    start = checkpoint.snapshot(model)
    whole = train_dense(model, data(), **settings)
    state = checkpoint.read(tmp_path)
    assert not {"budget", "start", "settle"} & state.settings.keys()
    state.settings["start"] = "of a version that noted it"
    state.write(tmp_path)
    checkpoint.put_back(model, start)
    again = train_dense(model, data(), **settings, resume=True)
    assert measured(again) == measured(whole)


@kinds("loader", "budget")
@pytest.mark.slow
def test_a_stop_while_testing_changes_nothing(whole, tmp_path):
    kind, expected, records = whole
    with pytest.raises(Interrupted):
        run(tmp_path, kind, 4 * STEPS, signal.SIGINT, testing=True)
    state = checkpoint.read(tmp_path)
    assert (state.epoch, state.step) == (3, STEPS)
    model, history = run(tmp_path, kind, resume=True)
    assert differing(expected, tensors(model)) == []
    assert measured(history) == records


@kinds("own generator", "budget")
@pytest.mark.slow
def test_after_two_stops_it_still_goes_on(whole, tmp_path):
    kind, expected, records = whole
    with pytest.raises(Interrupted):
        run(tmp_path, kind, 9, signal.SIGINT)
    with pytest.raises(Interrupted):
        run(tmp_path, kind, 10, signal.SIGINT, resume=True)
    model, history = run(tmp_path, kind, resume=True)
    assert differing(expected, tensors(model)) == []
    assert measured(history) == records


def stopping(step, model=None):
    """A task that Ctrl-C stops after so many steps."""
    done = 0

    def loss(outputs, targets):
        nonlocal done
        done += torch.is_grad_enabled()
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(outputs, targets)

    return Task(data().train, data().test, loss=loss)


def test_a_stopped_model_has_its_averages_and_can_be_given_again(tmp_path):
    model = gated()
    start = tensors(model)
    with pytest.raises(Interrupted):
        finetune(model, stopping(12), out=tmp_path, **SETTINGS)
    assert "0.weight" in differing(start, tensors(model))
    history = finetune(model, stopping(None), out=tmp_path, resume=True, **SETTINGS)
    assert history.last["epoch"] == EPOCHS
    with pytest.raises(Interrupted, match="without out"):
        finetune(gated(), stopping(12), **SETTINGS)


def test_a_stopped_model_goes_on_with_the_teacher_that_it_began_with(tmp_path):
    settings = {**SETTINGS, "lam": "10/N", "distill": 0.5}
    whole = gated()
    expected = finetune(whole, stopping(None), **settings)
    model = gated()
    with pytest.raises(Interrupted):
        finetune(model, stopping(12), out=tmp_path, **settings)
    assert not bool((l0prune.gates(model).z() == 1).all())
    history = finetune(model, stopping(None), out=tmp_path, resume=True, **settings)
    assert measured(history) == measured(expected)
    assert differing(tensors(whole), tensors(model)) == []


@pytest.mark.slow
def test_another_teacher_of_the_same_class_is_another_run(tmp_path):
    teacher = network()
    settings = {**SETTINGS, "distill": 0.5, "out": tmp_path}
    finetune(gated(), stopping(None), teacher=teacher, **settings)
    history = finetune(gated(), stopping(None), teacher=network(), resume=True, **settings)
    assert history.last["epoch"] == EPOCHS
    with torch.no_grad():
        teacher[0].bias[0] += 1e-3
    with pytest.raises(UsageError, match=r"teacher Sequential .* → Sequential"):
        finetune(gated(), stopping(None), teacher=teacher, resume=True, **settings)


def test_a_finished_run_is_not_run_again(tmp_path):
    model, history = run(tmp_path)
    stopped = task("split", 0, signal.SIGINT)  # in the first step, if there were one
    for fresh in (gated(dropout=0.3), model):  # what it started from, and what it made
        again = finetune(fresh, stopped, out=tmp_path, resume=True, **SETTINGS)
        assert differing(tensors(model), tensors(fresh)) == []
        assert measured(again) == measured(history)
    assert evaluate(fresh, data(), batch_size=30)["error"] == history.last["error"]


@pytest.mark.slow
def test_another_run_does_not_go_on_with_this_ones_checkpoint(tmp_path):
    run(tmp_path)

    def refused(says, model=None, source=None, **changes):
        model = gated(dropout=0.3) if model is None else model
        before = tensors(model)
        settings = {**SETTINGS, **changes}
        with pytest.raises(UsageError, match=says):
            finetune(model, source or task("split"), out=tmp_path, resume=True, **settings)
        assert differing(before, tensors(model)) == []

    refused("lam 2/N → 3/N", lam="3/N")
    refused("epochs 5 → 6", epochs=6)
    refused("N 240 → 120", source=Task(data(120).train, data().test))
    refused("data .*clouds", source=data())
    refused(r"loss task\S* → cross-entropy", loss="cross-entropy")
    refused("metric error_rate → accuracy", metric="accuracy")
    model = gated(dropout=0.3)
    with torch.no_grad():
        next(model.parameters())[0] += 1
    refused("other weights", model=model)


def test_without_resume_a_run_begins_anew(tmp_path):
    run(tmp_path)
    model = gated()
    with pytest.raises(Interrupted):
        finetune(model, stopping(2), out=tmp_path, **{**SETTINGS, "lam": 0})
    assert checkpoint.read(tmp_path).records == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("content", [b"", b"PK nothing", b"text"])
def test_a_damaged_checkpoint_is_refused(tmp_path, content):
    (tmp_path / checkpoint.NAME).write_bytes(content)
    model = gated()
    before = tensors(model)
    with pytest.raises(FileError):
        finetune(model, data(), out=tmp_path, resume=True, **SETTINGS)
    assert differing(before, tensors(model)) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be made"):
        finetune(gated(), data(), out=tmp_path / "file" / "run", **SETTINGS)


def test_a_full_disk_leaves_the_checkpoint_before_and_the_model_as_found(tmp_path, monkeypatch):
    model = gated()
    before = tensors(model)
    write = checkpoint.Checkpoint.write

    def full(state, folder):
        if state.epoch == 3:
            monkeypatch.setattr(torch, "save", lambda *_: os.write(10**6, b""))
        return write(state, folder)

    monkeypatch.setattr(checkpoint.Checkpoint, "write", full)
    with pytest.raises(FileError, match="not written"):
        finetune(model, data(), out=tmp_path, **SETTINGS)
    monkeypatch.undo()
    assert checkpoint.read(tmp_path).epoch == 2
    assert differing(before, tensors(model)) == []


@pytest.mark.parametrize("last", [False, True])
def test_a_loss_that_is_no_number_stops_training(tmp_path, last):
    done = 0

    def loss(outputs, targets):
        nonlocal done
        done += torch.is_grad_enabled()
        value = cross_entropy(outputs, targets)
        return value * float("nan") if done == (3 * STEPS if last else 2 * STEPS + 3) else value

    model = gated()
    before = tensors(model)
    task = Task(data().train, data().test, loss=loss)
    with pytest.raises(TrainingError) as caught:
        finetune(model, task, out=tmp_path, **SETTINGS)
    text = str(caught.value)
    assert f"epoch 3, step {8 if last else 3}: the loss is nan" in text
    assert "lr=0.001" in text
    assert "gate_lr=0.4" in text
    assert f"checkpoint of epoch 2 is in {tmp_path}" in text
    assert differing(before, tensors(model)) == []
    state = checkpoint.read(tmp_path)
    assert state.epoch == 2
    assert all(torch.isfinite(value).all() for value in state.model.values())


@pytest.mark.slow
def test_after_it_the_run_goes_on_more_slowly_from_its_checkpoint(tmp_path, capsys):
    """A rate that no network survives, and then one that it does."""
    settings = {**SETTINGS, "optimizer": "sgd", "clip": None, "schedule": fast_in_the_middle}
    with pytest.raises(TrainingError, match="resume=True"):
        finetune(gated(), data(), out=tmp_path, lr=1.0, **settings)
    good = checkpoint.read(tmp_path).epoch
    assert good >= 1
    slower = {**settings, "lr": 1e-20, "progress": True}
    history = finetune(gated(), data(), out=tmp_path, resume=True, **slower)
    assert history.last["epoch"] == EPOCHS
    told = capsys.readouterr().err
    assert f"resuming in epoch {good + 1}" in told
    assert "lr 1.0 → 1e-20" in told


def fast_in_the_middle(done):
    return 1e18 if done > 0.5 else 0.01


def test_a_weight_that_is_no_number_is_not_saved(tmp_path):
    """A gradient can be nan where the loss is not: of a square root at 0, say."""

    def task():
        done = 0

        def loss(outputs, targets):
            nonlocal done
            done += torch.is_grad_enabled()
            at_zero = outputs.mul(0).sum().sqrt() if done == STEPS else 0
            return cross_entropy(outputs, targets) + at_zero

        return Task(data().train, loss=loss)

    model = gated()
    before = tensors(model)
    with pytest.raises(TrainingError, match=r"holds nan or inf.*No epoch was done, so there is no"):
        finetune(model, task(), out=tmp_path, **SETTINGS)
    assert checkpoint.read(tmp_path) is None
    assert differing(before, tensors(model)) == []
    with pytest.raises(TrainingError, match="since out was not given"):
        finetune(model, task(), **SETTINGS)


def test_an_input_that_is_no_number_is_among_the_causes():
    inputs = data().train.inputs.clone()
    inputs[100] = float("nan")
    bad = Data("bad", Tensors(inputs, data().train.targets), data().test, 3)
    with pytest.raises(TrainingError, match="a nan in the data"):
        finetune(gated(), bad, **SETTINGS)


def test_a_layer_that_dies_whole_is_reported(capsys):
    model = gated()
    settings = {**SETTINGS, "lam": 1.0, "gate_lr": 1.0, "progress": True}
    history = finetune(model, data(), **settings)
    dead = history.last["dead"]
    assert dead == [axis.name for axis in l0prune.gates(model).axes]
    assert f"no open gate left in {', '.join(dead)}" in capsys.readouterr().err
