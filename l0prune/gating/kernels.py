"""Triton kernels that multiply many weights by their gates at once, and that take the gradients.

A weight is a matrix in memory: rows are its first dim, columns all other dims in memory order.
Column c has the position ``(c // after) % size`` along a gated dim, in any memory format. A table
has one line for each weight, and a list of tiles assigns work to each program.
"""

# Triton compiles these functions: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped,import-not-found"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = (32, 128)  # rows and columns of a weight that one program multiplies
BLOCK = (64, 32)  # numbers and slots of a sum that one program adds up
# A table of weights has 8 columns: offset in the products, rows, columns, after, size, and the
# offsets of factors of columns, of factors of rows (−1: none), and of partial sums. A table of sums
# has 6: begin, repeats, before, size, after, and the offset of the result.

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _tile(tiles, table, weights, z, WEIGHT, TR: tl.constexpr, TC: tl.constexpr):
    """Return offsets, mask and values of a program's tile, and factors of its columns and rows."""
    pid = tl.program_id(0)
    which = tl.load(tiles + 3 * pid)
    row = tl.load(tiles + 3 * pid + 1) + tl.arange(0, TR)
    column = tl.load(tiles + 3 * pid + 2) + tl.arange(0, TC)
    line = table + which * 8
    rows, columns = tl.load(line + 1), tl.load(line + 2)
    after, size = tl.load(line + 3), tl.load(line + 4)
    of_columns, of_rows = tl.load(line + 5), tl.load(line + 6)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    weight = tl.load(weights + which).to(tl.pointer_type(WEIGHT))
    value = tl.load(weight + at, mask=mask, other=0.0).to(z.dtype.element_ty)
    slot = (column // after) % size
    by_column = tl.load(z + of_columns + slot, (column < columns) & (of_columns >= 0), other=1.0)
    by_row = tl.load(z + of_rows + row, (row < rows) & (of_rows >= 0), other=1.0)
    return at, mask, value, by_column, by_row, row, column, line


@triton.jit
def _multiply(
    tiles, table, weights, z, out, WEIGHT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr
):
    at, mask, value, by_column, by_row, _, _, line = _tile(tiles, table, weights, z, WEIGHT, TR, TC)
    result = value * by_row[:, None] * by_column[None, :]
    tl.store(out + tl.load(line) + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _differentiate(
    tiles, table, weights, z, grad, out, partial, WEIGHT: tl.constexpr, TR: tl.constexpr,
    TC: tl.constexpr,
):  # fmt: skip
    at, mask, value, by_column, by_row, row, column, line = _tile(
        tiles, table, weights, z, WEIGHT, TR, TC
    )
    start = tl.load(line)
    g = tl.load(grad + start + at, mask=mask, other=0.0).to(z.dtype.element_ty)
    of_weight = g * by_row[:, None] * by_column[None, :]
    tl.store(out + start + at, of_weight.to(out.dtype.element_ty), mask=mask)
    rows, columns = tl.load(line + 1), tl.load(line + 2)
    of_columns, of_rows = tl.load(line + 5), tl.load(line + 6)
    begin = tl.load(line + 7)
    tile_row, tile_column = tl.min(row) // TR, tl.min(column) // TC
    product = g * value
    tl.store(
        partial + begin + tile_row * columns + column,
        tl.sum(product * by_row[:, None], axis=0),
        mask=(column < columns) & (of_columns >= 0),
    )
    # Sums of rows follow those of columns, if there are any.
    behind = tl.where(of_columns >= 0, (rows + TR - 1) // TR * columns, 0)
    tl.store(
        partial + begin + behind + tile_column * rows + row,
        tl.sum(product * by_column[None, :], axis=1),
        mask=(row < rows) & (of_rows >= 0),
    )


@triton.jit
def _add_up(blocks, table, values, out, TK: tl.constexpr, TS: tl.constexpr):
    """Write for each slot Σ ``values[begin + (k·before + b)·size·after + slot·after + a]``."""
    pid = tl.program_id(0)
    line = table + tl.load(blocks + 2 * pid) * 6
    slot = tl.load(blocks + 2 * pid + 1) + tl.arange(0, TS)
    begin, repeats, before = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    size, after, target = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
    count = repeats * before * after
    total = tl.zeros((TS,), dtype=out.dtype.element_ty)
    for first in range(0, count, TK):
        k = first + tl.arange(0, TK)
        at = (k // after)[:, None] * (size * after) + slot[None, :] * after + (k % after)[:, None]
        inside = (k < count)[:, None] & (slot < size)[None, :]
        total += tl.sum(tl.load(values + begin + at, mask=inside, other=0.0), axis=0)
    tl.store(out + target + slot, total, mask=slot < size)


def multiply(
    tiles: Tensor, table: Tensor, weights: Tensor, dtype: torch.dtype, z: Tensor, out: Tensor
) -> None:
    """Write each weight, multiplied by its gates, into its part of ``out``.

    Shape: tiles ``(programs, 3)``: weight, first row, first column; table ``(weights, 8)``;
    weights ``(weights,)``, their addresses; all int64. z and out flat.
    """
    launch(_multiply, len(tiles), tiles, table, weights, z, out, WEIGHT=DTYPES[dtype],
            TR=TILE[0], TC=TILE[1])  # fmt: skip


def differentiate(
    tiles: Tensor,
    table: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    z: Tensor,
    grad: Tensor,
    out: Tensor,
    partial: Tensor,
) -> None:
    """Write the gradients of weights into ``out``, and sums over each tile into ``partial``.

    Shape: as ``multiply``; grad and out as its result, partial flat.
    """
    launch(_differentiate, len(tiles), tiles, table, weights, z, grad, out, partial,
            WEIGHT=DTYPES[dtype], TR=TILE[0], TC=TILE[1])  # fmt: skip


def add_up(blocks: Tensor, table: Tensor, values: Tensor, out: Tensor) -> None:
    """Write sums of ``values``, one for each slot of each line of the table, into ``out``.

    Shape: blocks ``(programs, 2)``: line, first slot; table ``(lines, 6)``, int64.
    """
    launch(_add_up, len(blocks), blocks, table, values, out, TK=BLOCK[0], TS=BLOCK[1])


def launch(kernel: Any, programs: int, *tensors: Tensor, **constants: Any) -> None:
    """Launch this number of programs of a kernel on the tensors' device."""
    device = tensors[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*tensors, **constants)
