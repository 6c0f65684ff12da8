"""Which gates multiply at each position of a layout, as indices into the flat gate vector."""

from __future__ import annotations

import torch
from torch import Tensor

from l0prune.plan.layout import Both, Cat, Const, Layout, Pick, Prod, Slots
from l0prune.plan.plan import Plan


def gate_table(plan: Plan, layout: Layout) -> Tensor:
    """Which entries of the flat gate vector multiply at each position; ``plan.size`` means one.

    Shape: ``(factors, size_of(layout))``, int64; no rows where the layout has no axis.
    """
    match layout:
        case Const(size):
            return torch.empty(0, size, dtype=torch.int64)
        case Slots():
            flat = plan.flat(layout)
            return torch.arange(flat.start, flat.stop).unsqueeze(0)
        case Both(base, fine):
            return torch.cat([gate_table(plan, base), gate_table(plan, fine)])
        case Cat(parts):
            return _side_by_side([gate_table(plan, part) for part in parts], plan.size)
        case Prod(factors):
            return _nested([gate_table(plan, factor) for factor in factors])
        case Pick(base, index):
            return gate_table(plan, base)[:, torch.tensor(index, dtype=torch.int64)]


def _side_by_side(tables: list[Tensor], one: int) -> Tensor:
    """Concatenate along positions, filling up with ones to the deepest table."""
    depth = max((table.shape[0] for table in tables), default=0)
    return torch.cat(
        [
            torch.cat([table, table.new_full((depth - table.shape[0], table.shape[1]), one)])
            for table in tables
        ],
        dim=1,
    )


def _nested(tables: list[Tensor]) -> Tensor:
    """Row-major product: each position of the result meets one position of every table."""
    result = torch.empty(0, 1, dtype=torch.int64)
    for table in tables:
        outer, inner = result.shape[1], table.shape[1]
        result = torch.cat([result.repeat_interleave(inner, dim=1), table.repeat(1, outer)])
    return result


def distinct(gates: Tensor, one: int) -> Tensor:
    """Each row's gates with repetitions replaced by ``one``; shape ``(rows, gates)``."""
    ordered = gates.sort(dim=1).values
    repeated = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:] = torch.where(repeated, one, ordered[:, 1:])
    return ordered
