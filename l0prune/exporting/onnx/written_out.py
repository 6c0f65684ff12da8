"""Operators that ONNX lacks, or has with constants alone, written in terms of others.

A convolution in which every example has filters of its own puts the batch into the channels, and
has as many groups as there are examples. In ONNX the number of groups is a constant. As a product
of matrices, of patches of the image or followed by their sum, it is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional as F

from l0prune.capture.recurrent import RECURRENT
from l0prune.exporting.onnx.recurrent import by_layer, with_one_operator
from l0prune.infer.nodes import argument

_ATEN = torch.ops.aten


def written_out(program: ExportedProgram, *, recurrent: bool = True) -> ExportedProgram:
    """Return the program, or a copy in which operators are written out where they have to be.

    Args:
        program: the program.
        recurrent: recurrent layers, too: else they stay torch's own operators.
    """
    program = with_one_operator(program) if recurrent else program
    targets = {node.target for node in program.graph.nodes if _has_to_be(node)}
    if not targets:
        return program
    table: dict[Any, Any] = {target: _INSTEAD[target] for target in targets}
    changed: ExportedProgram = program.run_decompositions(table)
    return changed


def _has_to_be(node: Node) -> bool:
    if node.target in _CONVOLUTIONS:
        return isinstance(argument(node, 6, "groups", 1), Node)
    if node.target == _SCATTER:
        return bool(argument(node, 4, "reduce") == "mean")
    return node.target in _INSTEAD


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """From every point to every other."""
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    if math.isinf(p):
        return apart.abs().amax(-1)
    return apart.abs().pow(p).sum(-1).pow(1 / p)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int | SymInt = 1,
) -> Tensor:
    """Patches of the image times filters."""
    if not isinstance(groups, SymInt):
        result: Tensor = _ATEN.convolution(
            x, weight, bias, stride, padding, dilation, False, [0, 0], groups
        )
        return result
    kernel, wide = weight.shape[2:], weight.shape[1:].numel()
    stride, padding, dilation = (_two(each) for each in (stride, padding, dilation))
    size = tuple(
        (old + 2 * p - d * (k - 1) - 1) // s + 1
        for old, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    )
    patches = F.unfold(x, tuple(kernel), dilation, padding, stride)
    patches = patches.reshape(x.shape[0], groups, wide, size[0] * size[1])
    result = weight.reshape(groups, weight.shape[0] // groups, wide) @ patches
    return _biased(result.reshape(x.shape[0], weight.shape[0], *size), bias)


def _conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int | SymInt = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """The sum of what each pixel, times the filters, writes around itself."""
    if not isinstance(groups, SymInt):
        result: Tensor = _ATEN.convolution(
            x, weight, bias, stride, padding, dilation, True, output_padding, groups
        )
        return result
    kernel, wide = weight.shape[2:], weight.shape[1:].numel()
    stride, padding, dilation = (_two(each) for each in (stride, padding, dilation))
    size = tuple(
        (old - 1) * s - 2 * p + d * (k - 1) + 1 + more
        for old, k, s, p, d, more in zip(
            x.shape[2:], kernel, stride, padding, dilation, _two(output_padding), strict=True
        )
    )
    inner, area = weight.shape[0] // groups, x.shape[2:].numel()
    filters = weight.reshape(groups, inner, wide).transpose(1, 2)
    written = filters @ x.reshape(x.shape[0], groups, inner, area)
    written = written.reshape(x.shape[0], groups * wide, area)
    return _biased(F.fold(written, size, tuple(kernel), dilation, padding, stride), bias)


def _two(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes,) * (2 // len(sizes))


def _biased(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def _scatter_mean(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """A sum, divided by how many it is of; other reductions are in ONNX as they are."""
    if reduce != "mean":
        return NotImplemented
    given = src[tuple(slice(size) for size in index.shape)]
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(given))
    if not include_self:
        x = x.masked_fill(count > 0, 0)
    return x.scatter_add(dim, index, given) / (count + 1 if include_self else count.clamp(min=1))


_SCATTER = _ATEN.scatter_reduce.two
_CONVOLUTIONS = (_ATEN.conv2d.default, _ATEN.conv_transpose2d.input)
_INSTEAD: dict[Any, Callable[..., Any]] = {
    _ATEN.cdist.default: _cdist,
    _SCATTER: _scatter_mean,
    _ATEN.conv2d.default: _conv2d,
    _ATEN.conv_transpose2d.input: _conv_transpose2d,
    RECURRENT: by_layer,
}
