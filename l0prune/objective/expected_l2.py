"""The expected L2 penalty of gated weights: Σ P(weight is there)·W² (eq. 15 and 17)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from l0prune.plan.gate_index import distinct
from l0prune.plan.layout import Layout, axes_of
from l0prune.plan.plan import Plan
from l0prune.running.shards import whole

Counting = Literal["joint", "groups"]


class ExpectedSquares:
    """The sum over a model's parameters, with all that their values do not change worked out.

    Args:
        plan: of the model.
        kept: the slots that are left of a model that is cut while it trains, bool, flat.
    """

    def __init__(self, plan: Plan, kept: Tensor | None = None) -> None:
        self._plan, self._kept = plan, kept
        self._chances: dict[tuple[str, Counting, torch.device], _Chance] = {}

    def total(self, root: nn.Module, gates: Tensor, p: Tensor, counting: Counting) -> Tensor:
        """Σ P(weight is there)·W² over the trainable parameters of ``root``.

        Args:
            root: the module that was gated.
            gates: the gates' own parameter, which is left out.
            p: open probabilities, flat.
            counting: whose gates decide: those on all sides (``"joint"``), or those that
                multiply the weight (``"groups"``).
        """
        padded = torch.cat([p, p.new_ones(1)])
        total = p.new_zeros(())
        for name, parameter in root.named_parameters():
            if parameter.requires_grad and parameter is not gates:
                square = _numbers(parameter).to(p.device, p.dtype).square()
                total = total + self._chance(name, counting, p.device).sum(square, padded)
        return total

    def _chance(self, name: str, counting: Counting, device: torch.device) -> _Chance:
        key = (name, counting, device)
        if key not in self._chances:
            sides = self._sides(self._plan.aliases.get(name, name), counting)
            tables = [(dim, self._table(name, dim, layout)) for dim, layout in sides]
            self._chances[key] = _Chance(tables, self._plan.size, device)
        return self._chances[key]

    def _table(self, name: str, dim: int, layout: Layout) -> Tensor:
        """The gates at each position that is left of a parameter's dim."""
        table, kept = self._plan.gate_table(layout), self._kept
        if kept is None:
            return table
        dims = self._plan.tensors[self._plan.aliases.get(name, name)]
        return table[:, self._plan.mask(dims[dim], kept)]

    def _sides(self, name: str, counting: Counting) -> list[tuple[int, Layout]]:
        """The dims of a parameter whose gates decide whether its elements are there."""
        if counting == "groups":
            return [(site.dim, site.layout) for site in self._plan.sites if site.tensor == name]
        dims = enumerate(self._plan.tensors.get(name, ()))
        return [(dim, layout) for dim, layout in dims if axes_of(layout)]


class _Chance:
    """The probability that an element of one parameter is there: all its gates are open."""

    def __init__(self, sides: Sequence[tuple[int, Tensor]], one: int, device: torch.device) -> None:
        """From the dims with gates; ``one`` stands for no gate in their tables."""
        self._dims = sorted({dim for dim, _ in sides})
        tables = []
        for dim, table in sides:
            shape = [table.shape[0], *[1] * len(self._dims)]
            shape[1 + self._dims.index(dim)] = table.shape[1]
            tables.append(table.reshape(shape))
        self._factors: list[Tensor] = []
        for group in _sharing(tables, one):
            shape = list(torch.broadcast_shapes(*(table.shape[1:] for table in group)))
            rows = torch.cat([table.expand(table.shape[0], *shape) for table in group])
            gates = distinct(rows.flatten(1).T, one)
            self._factors.append(gates.T.reshape(-1, *shape).to(device))

    def sum(self, square: Tensor, padded: Tensor) -> Tensor:
        """Σ chance·square; ``padded`` holds the open probabilities and a 1 at the end."""
        others = [dim for dim in range(square.dim()) if dim not in self._dims]
        compact = whole(square.sum(others) if others else square)
        for gates in self._factors:
            chance = padded[gates[0]] if len(gates) == 1 else padded[gates].prod(0)
            compact = compact * chance
        return compact.sum()


def _numbers(parameter: Tensor) -> Tensor:
    """The parameter; a complex one with a last dim of real and imaginary parts."""
    return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def _sharing(tables: Sequence[Tensor], one: int) -> list[list[Tensor]]:
    """The tables in groups that have no gate in common, so that chances multiply."""
    groups: list[tuple[set[int], list[Tensor]]] = []
    for table in tables:
        gates = set(torch.unique(table).tolist()) - {one}
        touching = [group for group in groups if group[0] & gates]
        groups = [group for group in groups if not group[0] & gates]
        merged = gates.union(*(g for g, _ in touching))
        groups.append((merged, [t for _, ts in touching for t in ts] + [table]))
    return [members for _, members in groups]
