"""The ONNX file: models that torch's own exporter stumbles over."""

import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import onnx_difference
from small_networks import CASES
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


class InBlocks(nn.Module):
    """Attention within blocks of positions, beside the heads: five dims, or only three."""

    def __init__(self, mask, leading):
        super().__init__()
        self.qkv, self.proj, self.mask = nn.Linear(12, 36), nn.Linear(12, 5), mask
        self.leading = leading

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:-1], 3, 3, 4).movedim((-3, -2), (0, -3))
        if self.leading == 3:
            q, k, v = (each.flatten(0, 2) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        y = y.reshape(x.shape[0], 2, 3, 7, 4)
        return self.proj(y.transpose(2, 3).flatten(3))


MASKS = {"none": None, "added": torch.randn(7, 7), "boolean": torch.eye(7).bool()}
BY_DEFAULT = {("boolean", 5)}
ATTENTION = [
    pytest.param(
        MASKS[name], leading, id=f"{name}-{leading}",
        marks=() if (name, leading) in BY_DEFAULT else pytest.mark.slow,
    )
    for name in MASKS
    for leading in (5, 3)
]  # fmt: skip


@pytest.mark.parametrize(("mask", "leading"), ATTENTION)
@pytest.mark.slow
def test_attention_over_more_or_fewer_than_four_dims(mask, leading, tmp_path):
    x = torch.randn(2, 2, 7, 12)
    model = randomise(InBlocks(mask, leading)).eval()
    small = l0prune.export(close_some(l0prune.gate(model, (x,), exclude="*.in")))
    small.save_onnx(tmp_path / "model.onnx")
    assert small.params < small.params_before
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= 1e-5


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


@pytest.mark.slow
def test_what_the_exporters_optimizer_breaks_is_written_without_it(tmp_path):
    """Clamps of one tensor whose limits are buffers: it gives the limits one name."""
    module, example = CASES["clamps_of_one_tensor"]()
    model = close_some(l0prune.gate(randomise(module).eval(), example))
    small = l0prune.export(model)
    small.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, small, tmp_path / "model.onnx", example) <= 1e-5
