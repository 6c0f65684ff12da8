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
