import io
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import l0prune
from l0prune.cli.stages import announced, shown
from l0prune.running.stages import Stage, stage, watched


def test_whoever_watches_is_told_of_begin_and_end():
    seen = []

    def fails():
        with stage("outer"), stage("inner"):
            raise ValueError("text")

    with watched(seen.append), pytest.raises(ValueError, match="text"):
        fails()
    assert [(each.name, each.seconds is None) for each in seen] == [
        ("outer", True), ("inner", True), ("inner", False), ("outer", False),
    ]  # fmt: skip


def test_nothing_happens_without_a_watcher(capsys):
    with stage("unseen"):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_export_tells_its_stages(tmp_path):
    seen: list[Stage] = []
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    l0prune.gate(model, (torch.randn(2, 6),))
    with watched(seen.append):
        l0prune.export(model).save_onnx(tmp_path / "model.onnx")
    names = list(dict.fromkeys(each.name for each in seen))
    assert names[0] == "folding and cutting its tensors"
    assert names[-1] == "comparing its ONNX file"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_took_long_leaves_a_line(monkeypatch, is_terminal):
    monkeypatch.setattr("l0prune.cli.stages.LONG", 0.05)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with shown(console):
        with stage("short"):
            pass
        with stage("long"):
            time.sleep(0.06)
    lines = [line for line in console.file.getvalue().splitlines() if " s" in line]
    assert any("long: 0." in line or "long: 1" in line for line in lines)
    assert not any("short: " in line for line in lines)


def test_only_outermost_stages_are_announced():
    said = []
    with announced(said.append):
        with stage("one"), stage("part of one"):
            pass
        with stage("two"):
            pass
    assert said == ["one", "two"]
