"""The time of a network as a function of its widths, on the stairs of a runtime.

A term is ``ms × Π ↑size``, where ↑ rounds up to whole blocks. It may count only where some sizes
are multiples of a block, or only where they are not: runtimes have fast paths for these. No term
is negative, so that a time is one, also of widths that nobody has timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from l0prune.plan.expected import Polynomial, Sums, SumTable
from l0prune.plan.layout import Layout, axes_of, from_json, to_json
from l0prune.plan.numbers import is_count, is_number
from l0prune.plan.plan import Plan

Numbers = NDArray[np.float64]
_WIDEST = 2**16  # slots of a block


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
    """``ms × Π ↑size`` where its conditions hold, else 0.

    Attributes:
        group: number of the group of nodes whose time it is part of.
        ms: milliseconds, 0 or more.
        factors: sizes that are multiplied, rounded up.
        aligned: sizes that have to be whole blocks.
        unless: sets of sizes; not all of a set may be whole blocks.
    """

    group: int
    ms: float
    factors: tuple[Step, ...]
    aligned: tuple[Step, ...] = ()
    unless: tuple[tuple[Step, ...], ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        """All that it looks at."""
        return chain(self.factors, self.aligned, *self.unless)


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
        factors, aligned, unless, steps, ms = self._arrays
        padded = np.concatenate([sizes, np.ones((*sizes.shape[:-1], 1))], axis=-1)
        layout, block = steps[:, 0], steps[:, 1]
        blocks = np.ceil(padded[..., layout] / block)
        rounded = blocks * block
        is_whole = rounded == padded[..., layout]
        holds = is_whole[..., aligned].all(-1)
        for each in unless:
            holds &= ~is_whole[..., each].all(-1) | (each == 0).all(-1)
        result: Numbers = ms * rounded[..., factors].prod(-1) * holds
        return result

    def used(self, sizes: Numbers, asked: Numbers) -> Numbers:
        """Return the share of each term's value for positions that were asked for, from 0 to 1.

        Sizes that are the same at all widths count as asked for, however they are rounded up.

        Args:
            sizes: of each layout; shape ``(layouts,)``.
            asked: so many of these, of each.

        Returns shape ``(terms,)``, from 0 to 1.
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
        """Indices of steps for each term, padded with one that is always 1; steps; milliseconds."""
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
        steps = np.array([[step.layout, step.block] for step in distinct])
        return factors, aligned, unless, steps, np.array([term.ms for term in self.terms])

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, which ``from_json`` reads back."""
        return {
            "layouts": [to_json(layout) for layout in self.layouts],
            "terms": [
                [t.group, t.ms, _plain(t.factors), _plain(t.aligned), list(map(_plain, t.unless))]
                for t in self.terms
            ],
        }

    @staticmethod
    def from_json(data: Any) -> Stairs:
        """Inverse of ``to_json``.

        Raises:
            ValueError: the data is none.
        """
        try:
            layouts = tuple(map(from_json, data["layouts"]))
            terms = tuple(
                Term(
                    group,
                    ms,
                    _steps(factors),
                    _steps(aligned),
                    tuple(map(_steps, unless)),
                )
                for group, ms, factors, aligned, unless in data["terms"]
            )
            used = [step for term in terms for step in term.steps]
            if not all(is_count(step.layout, len(layouts) - 1) for step in used):
                raise ValueError("a term is about a layout that is not there")
            if not all(step.block and is_count(step.block, _WIDEST) for step in used):
                raise ValueError("a block is no number of slots")
            if not all(is_number(term.ms) and is_count(term.group) for term in terms):
                raise ValueError("a time is no number of milliseconds, or of no group")
        except (KeyError, TypeError) as error:
            raise ValueError(f"these are no stairs: {error}") from error
        return Stairs(layouts, terms)


def _plain(steps: Sequence[Step]) -> list[list[int]]:
    return [[step.layout, step.block] for step in steps]


def _steps(data: Any) -> tuple[Step, ...]:
    return tuple(Step(layout, block) for layout, block in data)


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
