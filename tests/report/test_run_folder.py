"""Runs leave a report, and one can be made of what runs without one have left."""

import hashlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from reported import content, look
from small_task import data, gated, network

import l0prune
from l0prune.errors import FileError, L0pruneWarning, TrainingError, UsageError
from l0prune.plan import measures
from l0prune.report.collect import budgets_of
from l0prune.report.content import BudgetState, Fit, Pair
from l0prune.report.live import live_page
from l0prune.report.report import report_of
from l0prune.running.environment import environment

QUIET = {"progress": False, "batch_size": 30, "epochs": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A gated model that has learned, its history, and the run's folder."""
    model, folder = gated(), tmp_path_factory.mktemp("run")
    history = l0prune.finetune(model, data(), budget="params=0.5", out=folder, **QUIET)
    return model, history, folder


def test_in_memory_and_from_the_folder_the_training_is_the_same(trained):
    _, history, folder = trained
    (of_history,) = l0prune.Report.of(history=history).content.trainings
    (of_folder,) = report_of(folder).content.trainings
    assert of_history == of_folder
    assert [e.train_loss for e in of_folder.epochs] == [r["train_loss"] for r in history.records]
    assert of_folder.before == history.records[0]["before"]
    assert (of_folder.planned, of_folder.steps, of_folder.metric) == (3, 24, "error")
    repeat = report_of(folder).content.repeat
    assert (repeat.versions, repeat.seed) == (environment()["versions"], 0)


def test_an_export_with_its_history_says_all_of_it(trained, tmp_path):
    model, history, _ = trained
    small = l0prune.export(model)
    (tmp_path / "small.onnx").write_bytes(b"onnx")
    small.files = (tmp_path / "small.onnx",)  # as save_onnx leaves it
    found = small.report(history).content
    assert found.gain.params == Pair(before=small.params_before, after=small.params)
    assert found.gain.bytes == Pair(before=None, after=4)
    assert found.gain.metric.before == history.records[0]["before"]["error"]
    assert found.gain.metric.after == history.last["error"]
    assert found.gain.seconds == pytest.approx(sum(r["seconds"] for r in history.records))
    assert [c.error for c in found.certificate] == [c.error for c in small.certificate.checks]
    (budget,) = found.budgets
    assert budget.met
    assert budget.share == history.last["budget"]["params=0.5"]["share"]
    assert found.repeat.files[0].sha256 == hashlib.sha256(b"onnx").hexdigest()
    assert l0prune.Report(found).html().count("<svg") >= 14


def test_how_widths_were_chosen_is_recorded():
    model = gated()
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 2 == 0)
    history = l0prune.finetune(model, data(), lam=1e-4, round_to=6, **QUIET)
    (training,) = l0prune.Report.of(history=history).content.trainings
    assert training.fit.model_dump() == history.last["fitted"]
    assert training.fit.filling
    assert training.fit.looks == []
    axes = {axis.name: axis for axis in gates.axes}
    for name, count in training.fit.filling.items():
        assert 0 < count < 6
        assert int(axes[name].open.sum()) in (6, 12, axes[name].size)


def test_a_budget_is_met_where_what_was_observed_meets_it():
    (training,) = content().trainings
    state = BudgetState(limit=0.5, target=0.5, share=0.499, multiplier=0.0)
    last = training.epochs[-1].model_copy(update={"budgets": {"latency=0.5": state}})
    fit = Fit(looks=[look(3.99, 3.8), look(3.992, 4.16, chosen=True)])
    after = training.model_copy(update={"epochs": [last], "fit": fit})
    (asked,) = budgets_of([after])
    assert asked.share == 4.16 / 8
    assert not asked.met
    (predicted,) = budgets_of([after.model_copy(update={"fit": None})])
    assert predicted.met


def test_a_run_that_diverged_has_no_points_where_there_were_no_numbers(tmp_path):
    records = [
        {"epoch": n, "step": n, "phase": "prune", "train_loss": loss}
        for n, loss in ((1, 0.5), (2, None))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    epochs = report_of(tmp_path).content.trainings[0].epochs
    assert [e.train_loss for e in epochs] == [0.5, None]
    assert "Loss of the task" in report_of(tmp_path).html()


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(FileError, match="there is no"):
        report_of(tmp_path / "nothing")
    with pytest.raises(FileError, match="no run's folder"):
        report_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": "x"}\n')
    with pytest.raises(FileError, match="is damaged"):
        report_of(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "result.json").write_text('{"metric": "error"}')
    with pytest.raises(FileError, match=r"result\.json is damaged"):
        report_of(tmp_path)


def test_commands_leave_a_report_and_say_where(done, refused, tmp_path, trained):
    model, _, folder = trained
    l0prune.save(model, tmp_path / "model.tuned.pt")
    (tmp_path / "model.run").mkdir()
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / "model.run" / name).write_text((folder / name).read_text())
    out, err = done("export", "--no-time", "--json")
    page = tmp_path / out["page"]
    assert page == tmp_path / "model.run" / "report.html"
    assert str(page.relative_to(tmp_path)) in err
    found = report_of(page.parent).content
    assert found.title == "model.tuned.pt"
    assert len(found.certificate) == len(out["certificate"])
    assert len(found.trainings[0].epochs) == 3

    before = page.read_text()
    page.unlink()
    assert done("report")[0].strip() == "model.run/report.html written"
    assert page.read_text() == before

    _, err = done("export", "--no-time", "--no-report", "--out", "b", "--json")
    assert "report" not in err
    refused(1, "report", "missing")


def test_without_a_run_the_command_says_what_to_name(refused):
    assert "no run here" in refused(2, "report")


def test_a_table_of_another_model_is_left_out(trained):
    def refuse(plan):
        raise UsageError("of another model")

    table = SimpleNamespace(of=refuse)
    assert l0prune.Report.of(model=trained[0], latency=table).content.time is None


def test_time_by_layer_adds_up_to_the_whole(trained):
    model = trained[0]
    gates = l0prune.gates(model)
    measure = measures.Macs(gates.plan)
    measure.filling_by_owner = lambda kept, asked: {}
    table = SimpleNamespace(of=lambda plan: measure, setting="here", dense=3.0, quality="fine")
    time = l0prune.Report.of(model=model, latency=table).content.time
    everything = torch.ones(gates.plan.size, dtype=torch.bool)
    assert sum(o.before for o in time.owners) == pytest.approx(measure.actual(everything))
    assert sum(o.after for o in time.owners) == pytest.approx(measure.actual(gates.open()))


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "dense"])
def test_the_page_is_renewed_while_a_run_goes_on(tmp_path, is_gated):
    seen = []

    def loss(outputs, targets):
        page = tmp_path / "report.html"
        seen.append(page.read_text() if page.exists() else "")
        return torch.nn.functional.cross_entropy(outputs, targets)

    model, train = (gated(), l0prune.finetune) if is_gated else (network(), l0prune.train_dense)
    history = train(model, data(), out=tmp_path, loss=loss, **QUIET)
    assert seen[0] == ""
    assert 'http-equiv="refresh"' in seen[-1]
    assert "has done 1 of 3 epochs" in seen[-1]
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    found = report_of(tmp_path).content
    expected = l0prune.Report.of(history=history, model=model if is_gated else None)
    assert found.title == "Sequential"
    assert [each.name for each in found.trainings] == ["finetune" if is_gated else "dense"]
    assert (found.trainings, found.layers) == (
        expected.content.trainings,
        expected.content.layers,
    )
    assert len(found.layers) == 2 * is_gated


def test_without_a_report_there_is_none(tmp_path):
    l0prune.finetune(gated(), data(), out=tmp_path, report=False, **QUIET | {"epochs": 1})
    assert not list(tmp_path.glob("report.*"))


def test_a_run_that_is_done_leaves_its_page_alone(tmp_path):
    model = gated()
    l0prune.finetune(model, data(), out=tmp_path, **QUIET | {"epochs": 1})
    (tmp_path / "report.html").write_text("old")
    l0prune.finetune(model, data(), out=tmp_path, resume=True, **QUIET | {"epochs": 1})
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_page_that_cannot_be_written_costs_no_training(tmp_path, monkeypatch):
    def full(*_, **__):
        raise FileError("the disk is full")

    monkeypatch.setattr(l0prune.Report, "of", full)
    with pytest.warns(L0pruneWarning, match="there is no report: the disk is full"):
        history = l0prune.finetune(gated(), data(), out=tmp_path, **QUIET | {"epochs": 1})
    assert len(history) == 1


def test_a_run_that_stops_says_where_and_why(tmp_path):
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        mean = torch.nn.functional.cross_entropy(outputs, targets)
        return mean * math.nan if len(calls) > 40 else mean

    with pytest.raises(TrainingError):
        l0prune.finetune(gated(), data(), out=tmp_path, loss=loss, **QUIET | {"epochs": 30})
    found = report_of(tmp_path).content
    assert "nan" in found.stopped
    page = (tmp_path / "report.html").read_text()
    assert f"has done {len(found.trainings[0].epochs)} of 30 epochs" in page
    assert "It stopped." in page
    assert 'http-equiv="refresh"' not in page


def test_where_nothing_is_trained_the_page_is_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(RuntimeError), live_page(tmp_path, "mine"):
        raise RuntimeError
    assert (tmp_path / "report.html").read_text() == "old"
