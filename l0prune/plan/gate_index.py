"""Gates that multiply at each position of a layout, as indices into the flat gate vector.

What gates spread to, what is cut and what it costs all go by this one table (``Plan.gate_table``).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from l0prune.plan.layout import Both, Cat, Const, Layout, Pick, Prod, Slots


def gate_table(layout: Layout, flat: Callable[[Slots], slice], one: int) -> Tensor:
    """Return the entries of the flat gate vector that multiply at each position.

    Args:
        layout: of the positions.
        flat: where slots lie in that vector.
        one: what stands for no gate.

    Shape: ``(factors, size_of(layout))``, int64; no rows where the layout has no axis.
    """

    def table(of: Layout) -> Tensor:
        match of:
            case Const(size):
                return torch.empty(0, size, dtype=torch.int64)
            case Slots():
                place = flat(of)
                return torch.arange(place.start, place.stop).unsqueeze(0)
            case Both(base, fine):
                return torch.cat([table(base), table(fine)])
            case Cat(parts):
                return _side_by_side(list(map(table, parts)), one)
            case Prod(factors):
                return _nested(list(map(table, factors)))
            case Pick(base, index):
                return table(base)[:, torch.tensor(index, dtype=torch.int64)]

    return table(layout)


def constant_positions(layout: Layout) -> int:
    """Count the positions along the dimension that no axis can take away."""
    match layout:
        case Const(size):
            return size
        case Slots():
            return 0
        case Cat(parts):
            return sum(map(constant_positions, parts))
        case Prod(factors):
            return prod(map(constant_positions, factors))
        case Both() | Pick():
            table = gate_table(layout, lambda slots: slice(slots.start, slots.stop), one=-1)
            return int((table < 0).all(0).sum())


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
