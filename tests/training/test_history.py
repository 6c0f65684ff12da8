import json
import math
import shutil
import sys

import pytest

from l0prune.errors import FileError, UsageError
from l0prune.training.history import History, Log


def record(epoch, phase="prune", **values):
    return {"epoch": epoch, "phase": phase, "train_loss": 1 / epoch, **values}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_best_is_found_in_the_phase_reached():
    records = [
        record(1, error=0.1),  # a larger network
        record(2, "settle", error=0.3),
        record(3, "settle", error=0.2),
        record(4, "settle", error=0.25),
    ]
    history = History(records)
    assert history.best is records[2]
    assert history.last is records[3]
    assert len(history) == 4


def test_without_test_data_the_training_loss_decides():
    records = [record(1), record(2)]
    assert History(records).best is records[1]


def test_a_metric_has_its_own_name():
    records = [record(1, mae=1.0), record(2, mae=2.0)]
    assert History(records, metric="mae").best is records[0]


def test_where_more_is_better_the_best_has_most():
    records = [record(1, accuracy=0.5, test_loss=2.0), record(2, accuracy=0.7, test_loss=3.0)]
    assert History(records, metric="accuracy", larger_is_better=True).best is records[1]
    # without the metric the loss counts, of which less is better
    assert History(records, metric="f1", larger_is_better=True).best is records[0]


def test_an_empty_history_says_so():
    with pytest.raises(UsageError, match="no whole epoch"):
        _ = History().last


def whole(epoch, **values):
    counts = {"params": 50, "dense_params": 100, "macs": 30, "dense_macs": 100, "open": {"fc": 3}}
    return record(epoch, seconds=1.0, **counts, **values)


def test_it_is_shown_in_a_line():
    assert repr(History()) == "History(no whole epoch yet)"
    history = History([whole(1, error=0.5), whole(2, error=0.25)])
    assert repr(history) == (
        "History(epoch 2/2  prune    loss 0.5000  error 25.00 %  params 50 (50.0 %)  "
        "MACs 30 (30.0 %)  3  1.0 s)"
    )


def test_a_notebook_shows_a_table_of_it():
    html = History([whole(n + 1, **{"<f1>": 0.25}) for n in range(70)])._repr_html_()
    assert "70 epochs, one in 4" in html
    assert html.count("&lt;f1&gt; 0.25") == 18
    assert "30 (30.0 %)" in html
    assert "<f1>" not in html
    dense = [record(1, "dense", test_loss=0.5)]
    assert "test loss 0.5" in History(dense)._repr_html_()
    assert "0 epochs" in History()._repr_html_()


def test_each_record_is_a_line_as_soon_as_it_is_there(tmp_path):
    log = Log(tmp_path, History(), tensorboard=False)
    assert lines(tmp_path) == []
    for epoch in (1, 2):
        log.write(record(epoch, open={"fc": 3}))
        assert lines(tmp_path) == [record(e, open={"fc": 3}) for e in range(1, epoch + 1)]
    log.close()


def test_a_run_that_goes_on_drops_lines_after_its_checkpoint(tmp_path):
    log = Log(tmp_path, History(), tensorboard=False)
    log.write(record(1))
    log.write(record(2))
    Log(tmp_path, History([record(1)]), tensorboard=False).write(record(2, again=True))
    assert lines(tmp_path) == [record(1), record(2, again=True)]


def test_what_is_no_number_is_null(tmp_path):
    Log(tmp_path, History(), tensorboard=False).write(record(1, error=math.nan, worse=math.inf))
    assert lines(tmp_path) == [record(1, error=None, worse=None)]


def test_a_folder_that_has_gone_is_said(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = Log(folder, History(), tensorboard=False)
    shutil.rmtree(folder)
    with pytest.raises(FileError, match="cannot be written"):
        log.write(record(1))


def test_tensorboard_is_used_where_installed_and_missed_where_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = Log(tmp_path, History(), tensorboard=None)
    log.write(record(1))
    log.close()
    with pytest.raises(UsageError, match=r"pip install 'l0prune\[tensorboard\]'"):
        Log(tmp_path, History(), tensorboard=True)


def test_curves_hold_every_number(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path, History(), tensorboard=True)
    log.write(record(1, open={"fc": 3}))
    log.write(record(2, open={"fc": 2}))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("open/fc")] == [(1, 3), (2, 2)]
    assert [e.value for e in events.Scalars("train_loss")] == [1, 0.5]
