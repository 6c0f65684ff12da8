import io

from rich.console import Console
from small_task import data, gated

import l0prune
from l0prune.gating.attaching import bypass
from l0prune.training.history import Display, describe

RECORD = {
    "epoch": 3, "step": 30, "phase": "prune", "seconds": 1.24, "lr": 1e-3, "train_loss": 0.12345,
    "penalty": 0.1, "test_loss": 0.2, "error": 0.0148, "expected_params": 7.0, "params": 77_312,
    "dense_params": 266_610, "expected_macs": 7.0, "macs": 1_820_000_000,
    "dense_macs": 3_640_000_000, "open": {"a": 277, "b": 201}, "dead": [],
}  # fmt: skip


def console(terminal):
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=200,
        highlight=False,
        legacy_windows=False,
    )


def test_a_record_is_one_line():
    assert describe(RECORD, 10) == (
        "epoch 3/10  prune    loss 0.1235  error 1.48 %  params 77.3 k (29.0 %)  "
        "MACs 1.82 G (50.0 %)  277-201  1.2 s"
    )


def test_a_layer_that_died_whole_is_named():
    assert "no open gate left in a, b" in describe({**RECORD, "dead": ["a", "b"]}, 10)


def test_many_axes_are_summed_up():
    opened = {str(number): 10 for number in range(30)}
    assert "  300 open  " in describe({**RECORD, "open": opened}, 10)


def test_a_record_without_gates_or_with_another_metric():
    record = {"epoch": 1, "phase": "dense", "seconds": 0.1, "train_loss": 2.0, "mae": 0.25}
    assert describe(record, 1) == "epoch 1/1  dense    loss 2.0000  mae 0.25  0.1 s"


def test_without_a_metric_the_loss_on_the_test_data_is_shown():
    record = {"epoch": 1, "phase": "dense", "seconds": 0.1, "train_loss": 2.0, "test_loss": 1.5}
    assert describe(record, 1) == "epoch 1/1  dense    loss 2.0000  test loss 1.5  0.1 s"
    assert "  accuracy 25.00 %  " in describe({**record, "accuracy": 0.25}, 1)


def test_without_a_terminal_it_is_one_line_an_epoch():
    out = console(terminal=False)
    display = Display(10, 10, console=out)
    display.start(0)
    for done in range(10):
        display.step(done, "prune")
    display.epoch(RECORD)
    display.note("a [note]")
    display.close()
    assert out.file.getvalue().splitlines() == [describe(RECORD, 10), "a [note]"]


def test_on_a_terminal_a_line_is_live():
    out = console(terminal=True)
    display = Display(10, 10, console=out)
    display.start(20)
    display.loss(0.5)
    display.step(25, "prune")
    display._bar._live.refresh()
    display.close()
    text = out.file.getvalue()
    assert "epoch 3/10 prune" in text
    assert "25/100" in text
    assert "loss 0.5000" in text


def test_it_can_be_silent(capsys):
    display = Display(10, 10, shown=False)
    display.start(0)
    display.step(1, "prune")
    display.epoch(RECORD)
    display.close()
    assert capsys.readouterr() == ("", "")


def test_it_goes_to_stderr(capsys):
    Display(10, 10).epoch(RECORD)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("epoch 3/10")


def test_a_run_says_first_what_the_network_is_like_without_gates(capsys):
    model = gated()
    with bypass(model):
        before = l0prune.evaluate(model, data())["error"]
    l0prune.finetune(model, data(), epochs=1, batch_size=30, lam=0.0)
    lines = capsys.readouterr().err.splitlines()
    (number,) = (n for n, line in enumerate(lines) if line.startswith("before training"))
    assert lines[number] == f"before training, without gates: error {100 * before:.2f} %"
    assert any(line.startswith("epoch 1/1") for line in lines[number:])


def timed_display(monkeypatch, epochs, steps, **options):
    now = [0.0]
    monkeypatch.setattr("l0prune.training.history.now", lambda: now[0])
    monkeypatch.setattr("l0prune.progress.stages.now", lambda: now[0])
    out = console(terminal=False)
    return Display(epochs, steps, console=out, **options), now, out.file


def test_a_long_run_says_how_long_it_will_take_after_a_few_steps(monkeypatch):
    display, now, file = timed_display(monkeypatch, 10, 100)
    display.start(0)
    with display.testing():
        now[0] += 3
    now[0] += 5  # the first step, which takes longer
    display.step(1, "warm-up")
    for done in range(2, 12):
        assert file.getvalue() == ""
        now[0] += 0.25
        display.step(done, "warm-up")
        if done == 5:
            break
    assert file.getvalue() == (
        "this run will take about 5 min: 995 steps of 0.25 s and 10 tests of 3 s, by the first 4\n"
    )
    display.close()


def test_a_short_run_does_not(monkeypatch):
    display, now, file = timed_display(monkeypatch, 2, 10)
    display.start(0)
    for done in range(1, 21):
        now[0] += 0.3
        display.step(done, "prune")
    display.close()
    assert file.getvalue() == "training: 6.0 s\n"


def test_without_a_terminal_a_long_epoch_is_a_line_each_ten_seconds(monkeypatch):
    display, now, file = timed_display(monkeypatch, 2, 20)
    display.start(20)  # a run that goes on
    display.loss(0.5)
    for done in range(21, 41):
        now[0] += 2.5
        display.step(done, "settle")
    display.close()
    lines = file.getvalue().splitlines()
    assert lines[0] == "epoch 2/2 settle: 24/40, loss 0.5000, 60%, 40 s left"
    assert lines[1] == "this run will take about 38 s: 15 steps of 2.5 s, by the first 4"
    assert len(lines) == 7
