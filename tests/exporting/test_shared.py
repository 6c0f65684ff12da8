"""Weights that an ONNX file reads as they are and transposed."""

import numpy as np
import onnx
import torch
from differences import run_onnx
from torch import nn

import l0prune


class Words(nn.Module):
    """An embedding whose table is the head, too, and neurons between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 8)
        self.inner, self.back = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        return (x + self.back(torch.relu(self.inner(x)))) @ self.table.weight.T


def test_a_tied_head_is_in_the_file_once(tmp_path):
    model, ids = Words().eval(), torch.randint(0, 30, (3, 5))
    l0prune.gate(model, ids)
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 3 > 0)
    small = l0prune.export(model)
    (file,) = small.save_onnx(tmp_path / "small.onnx")
    stored = [each for each in onnx.load(file).graph.initializer if each.data_type == 1]
    assert sum(int(np.prod(each.dims)) for each in stored) == small.params
    torch.testing.assert_close(run_onnx(file, ids)[0], model(ids), atol=1e-5, rtol=1e-5)
