"""Simulated quantisation in float64, which torch's own operators refuse."""

from __future__ import annotations

import pytest
import torch
from differences import run_onnx
from networks import Fn
from torch import nn
from torch.testing import assert_close

import l0prune
from l0prune.exporting.certify.dtypes import in_float64

ATEN = torch.ops.aten
WHOLE = torch.arange(-2, 3, dtype=torch.int32)


@pytest.mark.parametrize("zeros", [WHOLE, torch.linspace(-2.7, 3.1, 5)], ids=["whole", "any"])
def test_it_computes_what_torch_does_in_float32(zeros):
    torch.manual_seed(0)
    x, scales = torch.randn(40, 5, 7), torch.rand(5) * 0.05 + 0.01
    operator = ATEN.fake_quantize_per_channel_affine_cachemask.default
    expected, inside = operator(x, scales, zeros, 1, -20, 30)
    found, mask = in_float64(operator)(x, scales, zeros, 1, -20, 30)
    assert_close(found, expected)
    assert torch.equal(mask, inside)
    assert 0 < mask.sum() < mask.numel()
    exact = x.double(), scales.double(), zeros.double() if zeros.is_floating_point() else zeros
    assert_close(in_float64(operator)(*exact, 1, -20, 30)[0].float(), expected)


def test_a_learned_grid_is_that_of_torch():
    torch.manual_seed(0)
    x, scales, zeros = torch.randn(5, 40), torch.rand(5) * 0.05 + 0.01, torch.rand(5) * 9 - 4
    operator = ATEN._fake_quantize_learnable_per_channel_affine.default
    given = x, scales, zeros, 0, -20, 30, 1.0
    assert_close(in_float64(operator)(*given), operator(*given))


def network(zeros):
    torch.manual_seed(0)

    def forward(m, x):
        h = torch.fake_quantize_per_channel_affine(m.a(x), m.scales, m.zeros, 1, -128, 127)
        return m.b(h).relu() * h.square().sum(1, keepdim=True)

    layers = {"a": nn.Linear(4, 5), "b": nn.Linear(5, 3)}
    return Fn(forward, **layers, scales=torch.rand(5) * 0.05 + 0.01, zeros=zeros).eval()


def test_a_grid_without_a_point_at_zero_keeps_what_is_summed():
    x = torch.randn(2, 4)
    assert "a" in [axis.name for axis in l0prune.survey(network(WHOLE), x).axes]
    shifted = l0prune.survey(network(WHOLE + 0.3), x)
    assert "a" not in [axis.name for axis in shifted.axes]
    assert any(pin.where == "a.weight dim 0" for pin in shifted.pins)


def of_weights(m, x):
    weight = torch.fake_quantize_per_channel_affine(m.a.weight, m.scales, m.zeros, 0, -128, 127)
    return m.b(torch.relu(nn.functional.linear(x, weight, m.a.bias)))


def of_activations(m, x):
    h = torch.relu(m.a(x))
    return m.b(torch.fake_quantize_per_channel_affine(h, m.scales, m.zeros, 1, -128, 127))


@pytest.mark.parametrize("forward", [of_weights, of_activations])
@pytest.mark.one_in(2)
def test_a_model_with_a_grid_for_each_channel_is_exported(forward, tmp_path):
    torch.manual_seed(0)
    grids = {"scales": torch.rand(5) * 0.05 + 0.01, "zeros": WHOLE}
    x = torch.randn(2, 4)
    model = Fn(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3), **grids).eval()
    l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert small.widths["a"] == (2, 5)
    y = torch.randn(2, 4)
    assert_close(small.module(y), model(y))
    small.save_onnx(tmp_path / "model.onnx")
    assert_close(run_onnx(tmp_path / "model.onnx", y)[0], model(y))
