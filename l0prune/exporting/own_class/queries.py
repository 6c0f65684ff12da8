"""Queries that make up for a scale that the code takes from the size of what is left of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from l0prune.exporting.slicing.chosen import Chosen
from l0prune.plan.layout import size_of


def query_scales(chosen: Chosen) -> dict[str, Tensor]:
    """By parameter, what it is multiplied with once it is cut, float64, of as many dims.

    ``q·k / √k`` of k dims that are left is ``√(k/n) · q·k / √n`` in place of what n dims gave.
    """
    plan, kept = chosen.plan, chosen.kept
    scales: dict[str, Tensor] = {}
    for query in plan.code.queries:
        by = (int(plan.mask(query.head, kept).sum()) / size_of(query.head)) ** 0.5
        dims = plan.tensors[query.tensor]
        rows = dims[query.dim]
        scale = torch.ones(size_of(rows), dtype=torch.float64)
        for start, stop in query.ranges:
            scale[start:stop] = by
        if by != 1:
            shape = [-1 if dim == query.dim else 1 for dim in range(len(dims))]
            scales[query.tensor] = scale[plan.mask(rows, kept)].view(shape)
    return scales
