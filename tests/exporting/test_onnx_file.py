"""The ONNX file: models that torch's own exporter stumbles over."""

import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import onnx_difference
from torch import nn

import l0prune


class Causal(nn.Module):
    """Attention to what came before, heads first, its result viewed as rows again."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 5)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(x.transpose(1, 2).reshape(-1, 7, 12))


@pytest.mark.slow
def test_where_the_exporter_fails_it_is_given_plain_strides(tmp_path, monkeypatch):
    x = torch.randn(2, 7, 12)
    model = l0prune.gate(randomise(Causal()).eval(), (x,), exclude="*.in")
    small = l0prune.export(close_some(model))
    real, given = torch.onnx.export, []

    def stumbling(program, **options):
        given.append(program)
        if len(given) == 1:
            raise RuntimeError("Cannot view a tensor with these strides")
        return real(program, **options)

    monkeypatch.setattr(torch.onnx, "export", stumbling)
    small.save_onnx(tmp_path / "model.onnx")
    _, second = ([str(node.target) for node in each.graph.nodes] for each in given)
    assert "aten.clone.default" in second
    assert "aten.view.default" not in second
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= 1e-5
    assert any(check.what == "onnx" and check.batch == 3 for check in small.certificate.checks)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float64, torch.float16)),
    ],
)
def test_the_file_is_in_float32_whatever_the_model_is_in(dtype, tmp_path):
    x = torch.randn(2, 3, 6, 6, dtype=dtype)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 1))
    model = close_some(l0prune.gate(randomise(model).to(dtype).eval(), x))
    small = l0prune.export(model)
    (path,) = small.save_onnx(tmp_path / "model.onnx")
    graph = onnx.load(path).graph
    floats = {tensor.data_type for tensor in graph.initializer if "weight" in tensor.name}
    assert floats == {graph.input[0].type.tensor_type.elem_type} == {onnx.TensorProto.FLOAT}
    close = 1e-5 if dtype == torch.float64 else 0.05
    assert onnx_difference(model, small, path, x) <= close
    assert small.module(x).dtype == small.program.module()(x).dtype == dtype
