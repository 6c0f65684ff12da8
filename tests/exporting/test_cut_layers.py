"""Layers of which some inputs are gone, against torch's own on inputs that are zero there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from l0prune.exporting.onnx.file import to_onnx
from l0prune.files import cut_layers, given_sizes
from l0prune.files.cut_layers import CutGroupNorm, CutLayerNorm, PickedLinear

KEPT = torch.tensor([0, 2, 3, 6])


def drawn(norm):
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.double()


def with_zeros(x, dim):
    """``x`` among eight positions of this dim; the others are zero."""
    shape = list(x.shape)
    shape[dim] = 8
    return torch.zeros(shape, dtype=x.dtype).index_copy(dim, KEPT, x)


def cut_norm(whole, kind, **attributes):
    small = drawn(whole.__class__(4, 4) if kind is CutGroupNorm else nn.LayerNorm(4, whole.eps))
    small.__class__ = kind
    for name, value in attributes.items():
        setattr(small, name, value)
    if whole.weight is not None:
        small.weight, small.bias = (nn.Parameter(p[KEPT]) for p in (whole.weight, whole.bias))
    return small


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_layer_norm(scale):
    whole = drawn(nn.LayerNorm(8))
    cut = cut_norm(whole, CutLayerNorm, inputs=8, dim=-1)
    x = torch.randn(3, 5, 4, dtype=torch.float64) * scale + scale
    expected = whole(with_zeros(x, -1))[..., KEPT]
    torch.testing.assert_close(cut(x), expected, rtol=1e-12, atol=1e-12)
    assert cut(x).is_contiguous()  # code that goes on with .view() relies on that


def test_layer_norm_of_channels_before_positions():
    whole = drawn(nn.LayerNorm(8))
    cut = cut_norm(whole, CutLayerNorm, inputs=8, dim=1)
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    expected = whole(with_zeros(x, 1).movedim(1, -1)).movedim(-1, 1)[:, KEPT]
    torch.testing.assert_close(cut(x), expected, rtol=1e-12, atol=1e-12)


def test_layer_norm_over_channels_and_positions():
    whole = drawn(nn.LayerNorm([8, 3]))
    cut = cut_norm(whole, CutLayerNorm, inputs=24, dim=-2, normalized_shape=(4, 3))
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    expected = whole(with_zeros(x, 1))[:, KEPT]
    torch.testing.assert_close(cut(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 5), (2, 4, 3, 3)])
def test_group_norm(shape):
    whole = drawn(nn.GroupNorm(1, 8))
    cut = cut_norm(whole, CutGroupNorm, inputs=8, num_groups=1, num_channels=4)
    x = torch.randn(shape, dtype=torch.float64)
    expected = whole(with_zeros(x, 1))[:, KEPT]
    torch.testing.assert_close(cut(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_as_near_as_the_operator_is(dtype):
    whole = nn.LayerNorm(8, dtype=dtype)
    cut = cut_norm(whole.double(), CutLayerNorm, inputs=8, dim=-1).to(dtype)
    x = torch.randn(64, 4, dtype=dtype) * 100
    expected = whole.double()(with_zeros(x.double(), -1))[..., KEPT]
    assert cut(x).dtype == dtype
    own = F.layer_norm(with_zeros(x, -1), (8,))[..., KEPT]
    error, allowed = ((y.double() - expected).abs().max() for y in (cut(x), own))
    assert error <= 2 * allowed


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.one_in(2)
def test_norms_of_channels_are_plain_arithmetic_in_onnx(is_group):
    """Neither sizes that are read off at run time nor copies of them along channels."""
    kind = CutGroupNorm if is_group else CutLayerNorm
    numbers = {"num_groups": 1, "num_channels": 4} if is_group else {"dim": 1}
    whole = nn.GroupNorm(1, 8) if is_group else nn.LayerNorm(8)
    cut = cut_norm(drawn(whole), kind, inputs=8, **numbers).float().eval()
    shapes = ({0: torch.export.Dim("batch")},)
    given = torch.export.export(cut, (torch.randn(2, 4, 3, 5),), dynamic_shapes=shapes)
    found = {node.op_type for node in to_onnx(given).graph.node}
    assert found <= {"Add", "Mul", "ReduceMean", "Reciprocal", "Sqrt", "Sub"}


def test_picked_linear_is_a_linear_layer():
    layer = PickedLinear(2, 3)
    layer.register_buffer("kept", torch.tensor([1, 4]))
    x = torch.randn(2, 6)
    torch.testing.assert_close(layer(x), F.linear(x[:, [1, 4]], layer.weight, layer.bias))
    assert set(layer.state_dict()) == {"weight", "bias", "kept"}


def test_the_copied_files_need_torch_and_safetensors_alone():
    for module in (given_sizes, cut_layers):
        named = [
            each.module if isinstance(each, ast.ImportFrom) else each.names[0].name
            for each in ast.walk(ast.parse(Path(module.__file__).read_text()))
            if isinstance(each, ast.Import | ast.ImportFrom)
        ]
        foreign = {name.split(".")[0] for name in named} - sys.stdlib_module_names
        assert foreign <= {"torch", "safetensors", "l0prune"}
        assert {n for n in named if n.startswith("l0prune")} <= {"l0prune.files.given_sizes"}
