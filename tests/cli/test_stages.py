import io
import time

import pytest
import torch
from rich.console import Console
from small_task import clouds, gated
from torch import nn

import l0prune
from l0prune.cli.messages import announced
from l0prune.progress import stages
from l0prune.progress.display import shown
from l0prune.progress.stages import Stage, advanced, stage, watched


class Heads(nn.Module):
    """Attention whose head size is a number in its code, beside one that it keeps."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads, self.width = nn.Linear(8, 24), nn.Linear(8, 3), 2, 8

    def forward(self, x):
        q, k, v = (
            part.reshape(len(x), -1, self.heads, 4).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(len(x), -1, self.width))


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


@pytest.mark.slow
def test_an_export_tells_its_stages(tmp_path):
    seen: list[Stage] = []
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    l0prune.gate(model, (torch.randn(2, 6),))
    with watched(seen.append):
        l0prune.export(model).save_onnx(tmp_path / "model.onnx")
    names = list(dict.fromkeys(each.name for each in seen))
    assert names[:2] == ["exporting Sequential", "comparing the model with a copy of it"]
    assert "Sequential: checking the smaller model" in names
    assert names[-1] == "comparing the ONNX file with the gated model"
    assert not any(word in name.split() for name in names for word in ("its", "own"))


class Shares:
    """Shares that the works of each name have reached, after each step."""

    def __init__(self):
        self.of = {}

    def __call__(self, _):
        for work in stages._chain.get():
            if work.share is not None:
                self.of.setdefault(work.name, []).append(work.share)

    def check(self, name, least):
        """The work of this name was seen on its way, at so many different shares, to its end."""
        shares = self.of[name]
        assert len({*shares}) >= least, (name, shares)
        assert all(0 <= share <= 1 for share in shares)
        assert shares[-1] == pytest.approx(1), (name, shares)


def test_every_long_step_counts_what_is_done(tmp_path):
    seen, data = Shares(), clouds()
    with advanced.watched(seen):
        model = gated()
        seen.check("looking for what can be cut", 3)
        l0prune.fit(model, "params=0.7", l0prune.score(model, "fisher", data, batch_size=50))
        seen.check("scoring by fisher", 4)
        l0prune.evaluate(model, ([], data), batch_size=20)
        seen.check("testing the model", 2)
        small = l0prune.export(model)
        seen.check("exporting Sequential", 5)
        small.save_onnx(tmp_path / "model.onnx", time=True)
        seen.check("writing model.onnx", 5)
        inputs = torch.randn(300, 2)
        l0prune.shrink(
            nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), inputs, "macs=.5"
        )
        seen.check("looking at each layer cut alone", 3)
        seen.check("compensating", 2)


def test_branches_that_are_scored_count_what_is_done():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x):
            return x + self.lin(x)

    seen, data = Shares(), clouds()
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(6, 3))
    l0prune.gate(model, torch.randn(2, 6))
    with advanced.watched(seen):
        l0prune.score(model, "ablation", data, batch_size=100, batches=2)
    seen.check("scoring by ablation", 6)


def test_times_count_what_is_done(monkeypatch):
    monkeypatch.setattr("l0prune.exporting.onnx.collect.SECONDS", 0.001)
    seen, told, model = Shares(), [], gated()
    with advanced.watched(seen):
        l0prune.measure(model, samples=12, progress=lambda *done: told.append(done))
        seen.check("timing networks of other widths", 12)
        seen.check("writing 12 networks of other widths", 12)
    assert told[-1] == (12, 12)


def test_each_cut_of_a_training_is_one_stage_with_its_subject():
    said = []
    data, model = clouds(), gated()
    with announced(said.append):
        l0prune.finetune(model, data, budget="params=0.3", epochs=12, progress=False)
    cuts = [name for name in said if "cutting" in name]
    assert cuts
    assert {*cuts} == {"Sequential: cutting what its gates have closed"}
    assert {*said} == {*cuts, "scoring what the gates start from"}


def test_a_score_and_a_fit_tell_their_stages():
    said = []
    model, data = gated(), clouds()
    with announced(said.append):
        l0prune.fit(model, "params=0.5", l0prune.score(model, "auto", data), data=data)
    assert said == ["scoring by auto", "choosing how many branches go", "fitting to the budget"]


def test_checks_of_one_model_are_numbered():
    seen: list[Stage] = []
    torch.manual_seed(0)
    model = Heads().eval()
    l0prune.gate(model, (torch.randn(2, 5, 8),))
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 2 == 0)
    with watched(seen.append):
        l0prune.export(model)
    checks = [s.name for s in seen if s.seconds is None and "checking" in s.name]
    assert checks[0] == "Heads: checking the smaller model"
    assert checks[1].startswith("Heads: checking the smaller model, 2 of ")
    assert len(checks) == len({*checks})


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_took_long_leaves_a_line(monkeypatch, is_terminal):
    monkeypatch.setattr("l0prune.progress.display.LONG", 0.05)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with shown(console=console):
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
