"""Model of a network's time as a function of its widths; ``latency_fit`` finds one.

A term is ``ms × Π ↑size``, where ↑ rounds up to whole blocks. It may be limited to widths of which
some are multiples of a block, or are not: runtimes have fast paths for multiples. No term is
negative, so that no predicted time is, also at widths that were not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from l0prune.plan.expected import Polynomial, Sums, SumTable
from l0prune.plan.layout import Layout, axes_of
from l0prune.plan.numbers import LARGEST
from l0prune.plan.plan import Plan

Numbers = NDArray[np.float64]
_WIDEST = 2**16  # slots of the largest block
Milliseconds = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Step:
    """Size with a block: a factor, rounded up to a multiple of it, or a condition to be one.

    Attributes:
        least: minimum size, in a condition.
    """

    layout: Annotated[int, Field(ge=0)]
    block: Annotated[int, Field(ge=1, le=_WIDEST)]
    least: Annotated[int, Field(ge=1, le=_WIDEST)] = 1


@dataclass(frozen=True, slots=True)
class Term:
    """Summand of a latency model: ``ms × Π ↑size`` where its conditions hold, else 0.

    Attributes:
        factors: sizes that are multiplied, rounded up.
        aligned: sizes that have to be whole blocks.
        unless: sets of sizes; not all of a set may be whole blocks.
    """

    group: Annotated[int, Field(ge=0)]
    ms: Milliseconds
    factors: tuple[Step, ...]
    aligned: tuple[Step, ...] = ()
    unless: tuple[tuple[Step, ...], ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        """All steps of factors and conditions."""
        return chain(self.factors, self.aligned, *self.unless)


@dataclass(frozen=True)
class LatencyModel:
    """Time of a network at any widths: a sum of terms."""

    layouts: tuple[Layout, ...]
    terms: tuple[Term, ...]

    def values(self, sizes: Numbers) -> Numbers:
        """Return each term's milliseconds, shape ``(…, terms)``, by sizes ``(…, layouts)``."""
        factors, aligned, unless, steps, ms = self._arrays
        padded = np.concatenate([sizes, np.ones((*sizes.shape[:-1], 1))], axis=-1)
        layout, block = steps[:, 0], steps[:, 1]
        blocks = np.ceil(padded[..., layout] / block)
        rounded = blocks * block
        is_whole = (rounded == padded[..., layout]) & (padded[..., layout] >= steps[:, 2])
        holds = is_whole[..., aligned].all(-1)
        for each in unless:
            holds &= ~is_whole[..., each].all(-1) | (each == 0).all(-1)
        result: Numbers = ms * rounded[..., factors].prod(-1) * holds
        return result

    def asked_shares(self, sizes: Numbers, asked: Numbers) -> Numbers:
        """Return the share of each term's value that is due to requested positions, from 0 to 1.

        Sizes that are the same at all widths count as requested, however they are rounded up.

        Shape: sizes, and the requested ones (``asked``), ``(layouts,)``; result ``(terms,)``.
        """
        factors, _, _, steps, _ = self._arrays
        free = np.array([bool(axes_of(layout)) for layout in self.layouts] + [False])
        of, wanted = (np.append(each, 1.0)[steps[:, 0]] for each in (sizes, asked))
        rounded = np.ceil(of / steps[:, 1]) * steps[:, 1]
        shares = np.where(free[steps[:, 0]], wanted / np.maximum(rounded, 1.0), 1.0)
        result: Numbers = shares[factors].prod(-1)
        return result

    @cached_property
    def _arrays(self) -> tuple[Any, Any, list[Any], Any, Numbers]:
        """Return each term's step indices, padded with 0 (a step of size 1); the steps; times."""
        one = Step(len(self.layouts), 1)
        distinct = dict.fromkeys([one, *(step for term in self.terms for step in term.steps)])
        number = {step: i for i, step in enumerate(distinct)}

        def indices(chosen: Iterable[Sequence[Step]]) -> NDArray[np.int64]:
            return _padded([[number[step] for step in steps] for steps in chosen])

        sets = max((len(term.unless) for term in self.terms), default=0)
        unless = [
            indices(t.unless[i] if i < len(t.unless) else () for t in self.terms)
            for i in range(sets)
        ]
        factors = indices(term.factors for term in self.terms)
        aligned = indices(term.aligned for term in self.terms)
        steps = np.array([[step.layout, step.block, step.least] for step in distinct])
        return factors, aligned, unless, steps, np.array([term.ms for term in self.terms])


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    width = max(map(len, rows), default=0)
    result = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result


class LayoutSizes:
    """Evaluator of the open sizes of many layouts of a plan at once."""

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
        """Return the sizes for the kept slots; shape ``(layouts,)``."""
        sums = self._table.values(kept.to(self._table.one.dtype)).numpy()
        values = self._coefficients * sums[self._columns].prod(-1)
        return np.bincount(self._rows, values, minlength=self._count).astype(np.float64)
