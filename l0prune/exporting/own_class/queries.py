"""Queries that make up for a scale that the code takes from the size of what is left of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from l0prune.exporting.slicing.chosen import Chosen
from l0prune.plan.layout import size_of


def query_scales(chosen: Chosen) -> dict[str, Tensor]:
    """By parameter, what its rows that stay are multiplied with, float64, shape (rows,).

    ``q·k / √k`` of k dims that are left is ``√(k/n) · q·k / √n`` in place of what n dims gave.
    """
    plan, kept = chosen.plan, chosen.kept
    scales: dict[str, Tensor] = {}
    for query in plan.code.queries:
        by = (int(plan.mask(query.head, kept).sum()) / size_of(query.head)) ** 0.5
        rows = plan.tensors[query.tensor][0]
        scale = torch.ones(size_of(rows), dtype=torch.float64)
        for start, stop in query.ranges:
            scale[start:stop] = by
        if by != 1:
            scales[query.tensor] = scale[plan.mask(rows, kept)]
    return scales
