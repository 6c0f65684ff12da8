"""The time of a network as a function of its widths, on the stairs of a runtime.

A term is ``ms × Π ↑size``, where ↑ rounds up to whole blocks, and it counts only where some sizes
are multiples of a block: runtimes have fast paths for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from l0prune.cost.expected import SumTable
from l0prune.cost.moments import Polynomial, Sums
from l0prune.plan.layout import Layout, from_json, to_json
from l0prune.plan.plan import Plan

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """A size on the stairs.

    Attributes:
        layout: number of the layout.
        block: to whole multiples of this its size is rounded, or of this it has to be one.
    """

    layout: int
    block: int


@dataclass(frozen=True, slots=True)
class Term:
    """``ms × Π ↑size`` where all of ``aligned`` are whole blocks, else 0.

    Attributes:
        group: number of the group of nodes whose time it is part of.
        ms: milliseconds.
        factors: sizes that are multiplied, rounded up.
        aligned: sizes that have to be whole blocks.
    """

    group: int
    ms: float
    factors: tuple[Step, ...]
    aligned: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Stairs:
    """All terms of a network.

    Attributes:
        layouts: of the plan, whose sizes the terms are in.
        terms: their sum is the time.
    """

    layouts: tuple[Layout, ...]
    terms: tuple[Term, ...]

    def values(self, sizes: Numbers) -> Numbers:
        """The value of each term, in milliseconds.

        Args:
            sizes: of each layout; shape ``(…, layouts)``.

        Returns shape ``(…, terms)``.
        """
        factors, aligned, steps, ms = self._arrays
        padded = np.concatenate([sizes, np.ones((*sizes.shape[:-1], 1))], axis=-1)
        layout, block = steps[:, 0], steps[:, 1]
        blocks = np.ceil(padded[..., layout] / block)
        rounded = blocks * block
        is_whole = rounded == padded[..., layout]
        result: Numbers = ms * rounded[..., factors].prod(-1) * is_whole[..., aligned].all(-1)
        return result

    @cached_property
    def _arrays(self) -> tuple[Any, Any, Any, Numbers]:
        """Indices of steps for each term, padded with one that is always 1; steps; milliseconds."""
        one = Step(len(self.layouts), 1)
        distinct = dict.fromkeys([one, *(s for t in self.terms for s in (*t.factors, *t.aligned))])
        number = {step: i for i, step in enumerate(distinct)}
        factors = _padded([[number[step] for step in term.factors] for term in self.terms])
        aligned = _padded([[number[step] for step in term.aligned] for term in self.terms])
        steps = np.array([[step.layout, step.block] for step in distinct])
        return factors, aligned, steps, np.array([term.ms for term in self.terms])

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, which ``from_json`` reads back."""
        return {
            "layouts": [to_json(layout) for layout in self.layouts],
            "terms": [
                [t.group, t.ms, [[s.layout, s.block] for s in t.factors],
                 [[s.layout, s.block] for s in t.aligned]]
                for t in self.terms
            ],
        }  # fmt: skip

    @staticmethod
    def from_json(data: Any) -> Stairs:
        """Inverse of ``to_json``.

        Raises:
            ValueError: the data is none.
        """
        try:
            layouts = tuple(map(from_json, data["layouts"]))
            terms = tuple(
                Term(int(group), float(ms), _steps(factors), _steps(aligned))
                for group, ms, factors, aligned in data["terms"]
            )
            used = [step for term in terms for step in (*term.factors, *term.aligned)]
            if any(not 0 <= step.layout < len(layouts) or step.block < 1 for step in used):
                raise ValueError("a term is about a layout that is not there")
            if not all(np.isfinite(term.ms) for term in terms):
                raise ValueError("a time is no finite number")
        except (KeyError, TypeError) as error:
            raise ValueError(f"these are no stairs: {error}") from error
        return Stairs(layouts, terms)


def _steps(data: Any) -> tuple[Step, ...]:
    return tuple(Step(int(layout), int(block)) for layout, block in data)


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    width = max(map(len, rows), default=0)
    result = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result


class LayoutSizes:
    """The open sizes of many layouts of a plan at once.

    Args:
        plan: the plan.
        layouts: of it.
    """

    def __init__(self, plan: Plan, layouts: Sequence[Layout]) -> None:
        sums = Sums(plan, layouts)
        polynomials: list[Polynomial] = [sums.size(layout) for layout in layouts]
        self._table = SumTable(sums, torch.device("cpu"))
        entries = [
            (number, monomial, coefficient)
            for number, polynomial in enumerate(polynomials)
            for monomial, coefficient in polynomial.items()
        ]
        self._count = len(layouts)
        self._rows = np.array([number for number, _, _ in entries], dtype=np.int64)
        self._columns = _padded([monomial for _, monomial, _ in entries])
        self._coefficients = np.array([coefficient for _, _, coefficient in entries])

    def __call__(self, kept: Tensor) -> Numbers:
        """The sizes for the slots that stay; shape ``(layouts,)``."""
        sums = self._table.values(kept.to(self._table.one.dtype)).numpy()
        values = self._coefficients * sums[self._columns].prod(-1)
        return np.bincount(self._rows, values, minlength=self._count).astype(np.float64)
