"""Spreading one flat vector of gates over many layouts at once, in a handful of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from l0prune.plan.expected import first_order
from l0prune.plan.layout import Layout, size_of
from l0prune.plan.plan import Plan

_Row = tuple[int, Tensor]


class Spreader:
    """``plan.spread(layout, z)`` for all layouts at once, at a cost that hardly grows with them.

    Each position of a layout is a product of entries of z, so that rows of indices say it all. The
    layouts of fewer factors come first, and each further factor is a row from some position on:
    one gather per factor, then one split into a view for each layout.
    """

    def __init__(self, plan: Plan, layouts: Sequence[Layout]) -> None:
        tables = [plan.gate_table(layout) for layout in layouts]
        order = sorted(range(len(layouts)), key=lambda number: tables[number].shape[0])
        sizes = [size_of(layouts[number]) for number in order]
        self._sizes = sizes
        self._place = [order.index(number) for number in range(len(layouts))]
        # No row at all is a factor of one, for which the index past the last gate stands.
        in_order = [
            tables[number] if len(tables[number]) else torch.full((1, size), plan.size)
            for number, size in zip(order, sizes, strict=True)
        ]
        self._rows: list[_Row] = []
        for factor in range(max(map(len, in_order), default=0)):
            deep = [table[factor] for table in in_order if len(table) > factor]
            row = torch.cat(deep)
            self._rows.append((sum(sizes) - len(row), row))
        self._has_ones = any(bool((row == plan.size).any()) for _, row in self._rows)
        self._is_split = len(self._rows) == 1 and torch.equal(
            self._rows[0][1], torch.arange(plan.size)
        )

    def __call__(self, z: Tensor) -> Sequence[Tensor]:
        """One vector per layout, of z's dtype and device; differentiable any number of times over.

        Shape: z ``(plan.size,)``; results ``(size_of(layout),)`` each.
        """
        if not self._rows:
            return ()
        if not self._is_split:
            if self._rows[0][1].device != z.device:
                self._rows = [(start, row.to(z.device)) for start, row in self._rows]
            z = F.pad(z, (0, 1), value=1.0) if self._has_ones else z
            if z.requires_grad and torch.is_grad_enabled():
                z = _ProductGather.apply(z, self._rows)
            else:
                z = _product(_gathered(z, self._rows), self._rows)
        parts = z.split_with_sizes(self._sizes)
        return [parts[place] for place in self._place]


def _gathered(values: Tensor, rows: list[_Row]) -> list[Tensor]:
    return [values.index_select(0, row) for _, row in rows]


def _product(gathered: list[Tensor], rows: list[_Row]) -> Tensor:
    """The first factor of each position times what others it has."""
    if len(rows) == 1:
        return gathered[0]
    result = gathered[0].clone()
    for (start, _), factor in zip(rows[1:], gathered[1:], strict=True):
        result[start:] *= factor
    return result


class _ProductGather(Function):
    """The product of all rows' gathers, whose backward pass may run more than once.

    See ``hard_sigmoid`` for why what it needs are attributes rather than saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: list[_Row]) -> Tensor:
        ctx.size, ctx.rows = values.shape[0], rows
        gathered = _gathered(values, rows)
        ctx.gathered = gathered if len(rows) > 1 else []
        return _product(gathered, rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad.new_zeros(ctx.size)
        for number, (start, row) in enumerate(ctx.rows):
            share = grad[start:]
            for other, factor in enumerate(ctx.gathered):
                if other != number:
                    share = _times(share, start, factor, ctx.rows[other][0])
            result.index_add_(0, row, share)
        return result, None


def _times(share: Tensor, start: int, factor: Tensor, begins: int) -> Tensor:
    """Multiply a share, from position ``start`` on, by a factor of positions from ``begins`` on."""
    if begins <= start:
        return share * factor[start - begins :]
    share = share.clone()
    share[begins - start :] *= factor
    return share
