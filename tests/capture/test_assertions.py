"""A network that asserts something about its values is cut; its ONNX file does not assert it."""

from __future__ import annotations

import pytest
import torch
from differences import onnx_difference
from networks import Fn
from torch import nn

import l0prune


def asserting(m, x):
    h = torch.relu(m.a(x))
    torch._check_tensor_all(h >= 0)
    return m.b(h)


@pytest.mark.slow
def test_the_file_leaves_out_what_is_asserted(tmp_path):
    model, x = Fn(asserting, a=nn.Linear(4, 8), b=nn.Linear(8, 2)).eval(), torch.randn(2, 4)
    l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    graph = small.program.graph
    assert any("assert_scalar" in str(node.target) for node in graph.nodes)
    small.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= 1e-5
