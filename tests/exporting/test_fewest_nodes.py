"""An ONNX file has, node by node, what torch's exporter makes of a network built at its sizes."""

import contextlib
import io

import onnx
import pytest
import torch
from deadness import randomise
from torch import nn

import l0prune


class Residual(nn.Module):
    """Convolutions, one of them depthwise, BatchNorms, a clamp, a mean and two Linear layers."""

    def __init__(self, stream, inner, hidden):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stream, 3, bias=False), nn.BatchNorm2d(stream))
        self.up = nn.Sequential(nn.Conv2d(stream, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6())
        self.apart = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.down = nn.Sequential(nn.Conv2d(inner, stream, 1), nn.BatchNorm2d(stream))
        self.hidden, self.out = nn.Linear(stream, hidden), nn.Linear(hidden, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.down(self.apart(self.up(x)))
        return self.out(torch.relu(self.hidden(x.mean((2, 3)))))


@pytest.mark.slow
def test_a_residual_network(tmp_path):
    x = torch.randn(2, 3, 6, 6)
    model = l0prune.gate(randomise(Residual(8, 12, 10)).eval(), (x,))
    left = {"stem.0": 5, "up.0": 7, "hidden": 6}
    bank = l0prune.gates(model)
    bank.log_alpha.data.fill_(5.0)
    for axis in bank.axes:
        if axis.kind == "branch":
            continue
        bank.log_alpha.data[axis.slice][left[axis.name] :] = -5.0
    l0prune.export(model).save_onnx(tmp_path / "model.onnx")
    fresh = randomise(Residual(*left.values())).eval()
    with contextlib.redirect_stdout(io.StringIO()):
        made = torch.onnx.export(fresh, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    ours, theirs = onnx.load(tmp_path / "model.onnx"), made.model_proto
    assert [node.op_type for node in ours.graph.node] == [n.op_type for n in theirs.graph.node]
    shapes = [
        sorted(tuple(each.dims) for each in model.graph.initializer) for model in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]
