"""Spreading one flat vector of gates over many layouts at once, in a handful of operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from l0prune.cost.first_order import first_order
from l0prune.plan.layout import Layout, size_of
from l0prune.plan.plan import Plan


class Spreader:
    """``plan.spread(layout, z)`` for all layouts at once, at a cost that hardly grows with them.

    Each position of a layout is a product of entries of z, so that a table of indices says it
    all: one gather per number of factors, then one split into a view for each layout.
    """

    def __init__(self, plan: Plan, layouts: Sequence[Layout]) -> None:
        self._sizes = [size_of(layout) for layout in layouts]
        tables = [plan.gate_table(layout) for layout in layouts]
        by_depth: dict[int, list[int]] = defaultdict(list)
        for number, table in enumerate(tables):
            by_depth[table.shape[0]].append(number)
        self._groups: list[tuple[list[int], Tensor]] = [
            (numbers, torch.cat([tables[number] for number in numbers], dim=1))
            for _, numbers in sorted(by_depth.items())
        ]
        self._is_split = self._lie_in_order(plan.size)

    def _lie_in_order(self, size: int) -> bool:
        """Are the layouts just consecutive pieces of z?"""
        if len(self._groups) != 1:
            return False
        table = self._groups[0][1]
        return table.shape == (1, size) and torch.equal(table[0], torch.arange(size))

    def __call__(self, z: Tensor) -> Sequence[Tensor]:
        """One vector per layout, of z's dtype and device; differentiable any number of times over.

        Shape: z ``(plan.size,)``; results ``(size_of(layout),)`` each.
        """
        if self._is_split:
            return z.split_with_sizes(self._sizes)
        if self._groups and self._groups[0][1].device != z.device:
            self._groups = [(numbers, table.to(z.device)) for numbers, table in self._groups]
        padded = F.pad(z, (0, 1), value=1.0)
        parts: list[Tensor] = [padded] * len(self._sizes)
        for numbers, table in self._groups:
            values = _ProductGather.apply(padded, table)
            for number, part in zip(
                numbers, values.split_with_sizes([self._sizes[n] for n in numbers]), strict=True
            ):
                parts[number] = part
        return parts


class _ProductGather(Function):
    """``values[table].prod(0)``, whose backward pass may run more than once (see hard_sigmoid)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, table: Tensor) -> Tensor:
        ctx.size, ctx.table = values.shape[0], table
        ctx.gathered = gathered = values[table]
        return gathered[0] if table.shape[0] == 1 else gathered.prod(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad.new_zeros(ctx.size)
        for row, indices in enumerate(ctx.table):
            share = grad
            for other in range(len(ctx.table)):
                if other != row:
                    share = share * ctx.gathered[other]
            result.index_add_(0, indices, share)
        return result, None
