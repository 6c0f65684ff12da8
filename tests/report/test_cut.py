"""Layers before and after a cut, beside the modules that an export has."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.report.layers import UNGATED


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.deep = nn.Conv2d(16, 16, 3, groups=16)
        self.up = nn.Conv2d(16, 32, 1)
        self.down = nn.Conv2d(32, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.deep(self.stem(x).relu())
        x = x + self.down(self.up(x).relu())
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model = l0prune.gate(Attention(), torch.randn(2, 3, 9, 9), branches=False)
    gates = l0prune.gates(model)
    gates.set_open(torch.rand(gates.plan.size) > 0.4)
    return model, l0prune.export(model)


@pytest.mark.slow
def test_widths_and_params_are_those_of_the_exported_modules(exported):
    model, dense = exported
    old, new = dict(model.named_modules()), dict(dense.module.named_modules())
    layers = dense.report().content.layers
    assert [layer.name for layer in layers] == ["stem", "deep", "up", "down", "head"]
    for layer in layers:
        before, after = old[layer.name], new[layer.name]
        for side, name in ((layer.input, "in"), (layer.output, "out")):
            kind = "features" if layer.kind == "Linear" else "channels"
            assert side.before == getattr(before, f"{name}_{kind}")
            assert side.after == getattr(after, f"{name}_{kind}")
        assert layer.params.after == sum(p.numel() for p in after.parameters())
    assert sum(layer.params.after for layer in layers) == dense.params
    assert sum(layer.macs.after for layer in layers) == dense.macs
    assert sum(layer.macs.before for layer in layers) == dense.macs_before


def test_before_an_export_the_same_is_said_of_the_gated_model(exported):
    model, dense = exported
    found, of_export = l0prune.Report.of(model=model).content, dense.report().content
    assert (found.layers, found.axes) == (of_export.layers, of_export.axes)
    assert found.gain.params == of_export.gain.params
    assert found.certificate == []


def test_layers_that_are_cut_together_name_the_same_axis(exported):
    by_name = {layer.name: layer.output.axes for layer in exported[1].report().content.layers}
    assert by_name["stem"] == by_name["deep"] == by_name["down"] != by_name["up"]
    assert by_name["head"] == []


def test_what_has_no_gate_and_no_pin_says_so():
    model = l0prune.gate(Attention(), torch.randn(2, 3, 9, 9), exclude="up")
    layers = {layer.name: layer for layer in l0prune.Report.of(model=model).content.layers}
    assert layers["up"].output.reason == UNGATED
    assert "output" in layers["head"].output.reason


def test_positions_do_not_count_as_width():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)
            self.positions = nn.Parameter(torch.randn(1, 5, 8))

        def forward(self, x):
            return self.down((self.up(x) + self.positions).relu())

    model = l0prune.gate(Embedded(), torch.randn(2, 5, 4))
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 2 == 0)
    layers = {layer.name: layer for layer in l0prune.Report.of(model=model).content.layers}
    side = layers["positions"].output
    assert (side.before, side.after) == (8, layers["up"].output.after)


@pytest.mark.slow
def test_heads_are_counted_and_numbered():
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = l0prune.gate(network, torch.randn(2, 5, 16))
    gates = l0prune.gates(model)
    (axis,) = [axis for axis in gates.axes if axis.kind == "head"]
    gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
    open_ = gates.open()
    open_[axis.slice] = torch.tensor([True, False, False, True])
    gates.set_open(open_)
    (found,) = [axis for axis in l0prune.Report.of(model=model).content.axes if axis.kind == "head"]
    assert (found.before, found.after, found.kept) == (4, 2, [0, 3])


def test_layers_of_a_branch_that_is_gone_have_nothing_left():
    torch.manual_seed(0)
    model = l0prune.gate(Attention().eval(), torch.randn(2, 3, 9, 9), branches=True)
    gates = l0prune.gates(model)
    (switch,) = (axis for axis in gates.plan.axes if axis.kind == "branch")
    open_ = torch.ones(gates.plan.size, dtype=torch.bool)
    open_[switch.start] = False
    gates.set_open(open_)
    small = l0prune.export(model)
    content = small.report().content
    layers = {layer.name: layer for layer in content.layers}
    assert sum(layer.params.after for layer in layers.values()) == small.params
    assert sum(layer.macs.after for layer in layers.values()) == small.macs
    for name in ("up", "down"):
        for side in (layers[name].input, layers[name].output):
            assert (side.after, side.reason) == (0, f"the branch {switch.name} is gone")
    assert layers["stem"].output.after == 16
    assert [axis.after for axis in content.axes if axis.kind == "branch"] == [0]


def test_files_that_were_deleted_are_left_out(exported, tmp_path):
    _, dense = exported
    (path,) = dense.save_onnx(tmp_path / "model.onnx", time=False)
    assert dense.report().content.gain.bytes.after == path.stat().st_size
    path.unlink()
    found = dense.report().content
    assert found.gain.bytes is None
    assert found.repeat.files == []
