"""Cost of a network in parameters, MACs, …: dense, actual, and expected under its gates.

A weight is there if the gates on all its sides are open, so a layer's expected count is the
expectation of a product of counts: with gates that are independent, Π over its dims of
E[open size], and exact moments where one axis meets two dims. That is E‖θ‖₀ of the paper for
coupled gates. The paper itself counts each gate's own group (eq. 16): ``group_weights``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import prod
from statistics import fmean
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.plan.activations import Activation
from l0prune.plan.expected import (
    Monomial,
    SumPolynomial,
    Sums,
    SumTable,
    Terms,
    multiply,
    precision,
)
from l0prune.plan.layout import Layouts, axes_of, constant_positions
from l0prune.plan.plan import Cost, Plan

Axes = frozenset[int] | None
"""Numbers of the axes to which a count is restricted, or None for the whole network."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A monomial of the expected cost, with the module and the axes that it belongs to."""

    owner: str
    axes: frozenset[int]
    monomial: Monomial
    coefficient: float


class CostModel:
    """Cost terms of a plan as functions of its gates, evaluated per unit.

    Construction is cheap: the polynomials are built on first use.

    Args:
        plan: whose gates these are.
        costs: terms over its axes; None for those of the plan, in params and MACs.
    """

    def __init__(self, plan: Plan, costs: Sequence[Cost] | None = None) -> None:
        self.plan = plan
        self.costs = plan.costs if costs is None else tuple(costs)
        self._tables: dict[torch.device, SumTable] = {}
        self._on_device: dict[tuple[str, torch.device], Terms] = {}
        self._polynomials: dict[
            tuple[str, torch.device, tuple[float, ...] | None, Axes], SumPolynomial
        ] = {}

    def dense(self, unit: str, through: Axes = None) -> int:
        """The count with all gates open; ``through`` as in ``actual``."""
        return round(self.dense_amount(unit, through))

    def dense_amount(self, unit: str, through: Axes = None) -> float:
        """Return the dense count before rounding to a whole number."""
        if through is not None:
            everything = torch.ones(self.plan.size, dtype=torch.float64)
            return self.amount(everything, unit, through)
        terms = (cost for cost in self.costs if cost.unit == unit)
        return sum(cost.scale * prod(dim.size for dim in cost.dims) for cost in terms)

    def reachable(self, unit: str) -> float:
        """Return the share of the dense count removed with every gate closed, from 0 to 1."""
        return reachable(cost for cost in self.costs if cost.unit == unit)

    def actual(self, open_: Tensor, unit: str, through: Axes = None) -> int:
        """The count of the model that an export with these open gates makes.

        Args:
            open_: bool per gate, shape ``(plan.size,)``.
            unit: of the terms that count, such as ``"params"`` or ``"macs"`` (of one example).
            through: count only what these axes could take away; None to count everything.
        """
        return round(self.amount(self.plan.kept(open_).to(torch.float64), unit, through))

    def amount(self, kept: Tensor, unit: str, through: Axes = None) -> float:
        """Return the cost of a model with ``kept`` slots: 1 if kept, else 0, ``(plan.size,)``."""
        values = self._compiled(unit, kept.device).values(kept)
        if through is not None:
            values = values * values.new_tensor(self._counted(unit, through))
        return float(values.sum())

    def _counted(self, unit: str, through: Axes) -> list[float]:
        """Return 1 for each term that depends on one of these axes, else 0; all 1 for None."""
        return [
            float(through is None or not term.axes.isdisjoint(through))
            for term in self._terms_in(unit)
        ]

    def axes_in(self, unit: str) -> frozenset[int]:
        """Numbers of the axes whose slots count in this unit."""
        return frozenset().union(*(term.axes for term in self._terms_in(unit)))

    def expected(
        self,
        p: Tensor,
        unit: str,
        axis_weights: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        through: Axes = None,
    ) -> Tensor:
        """The expected count at open probabilities ``p``, exact for independent gates.

        Args:
            p: P(z ≠ 0) of each gate, shape ``(plan.size,)``.
            unit: of the terms that count, such as ``"params"`` or ``"macs"`` (of one example).
            axis_weights: a price per axis. A weight that several axes share is charged at the
                mean of their prices, one that no gate can remove at the mean of all.
            dtype: of the result, by default float64, in which it is computed anyway.
            through: count only what these axes could take away; None to count everything.

        Returns a scalar that is differentiable in ``p``.
        """
        if p.shape != (self.plan.size,):
            raise UsageError(
                f"open probabilities have shape {tuple(p.shape)}, but the plan has "
                f"{self.plan.size} gates in one flat vector"
            )
        weights = None if axis_weights is None else tuple(axis_weights)
        polynomial = self._polynomial(unit, p.device, weights, through)
        return polynomial(p, dtype or precision(p.device))

    def by_owner(self, p: Tensor, unit: str) -> dict[str, float]:
        """The expected count of each module; with 0/1 probabilities, its real count."""
        result: dict[str, float] = defaultdict(float)
        for term, value in zip(self._terms_in(unit), self._values(p, unit), strict=True):
            result[term.owner] += value
        return dict(result)

    def _values(self, p: Tensor, unit: str) -> list[float]:
        values: list[float] = self._compiled(unit, p.device).values(p).tolist()
        return values

    def _polynomial(
        self, unit: str, device: torch.device, weights: tuple[float, ...] | None, through: Axes
    ) -> SumPolynomial:
        """Return the sum of all terms, each times the mean price of its axes."""
        key = (unit, device, weights, through)
        if key not in self._polynomials:
            prices = None
            if weights is not None:
                everyone = range(len(weights))
                sharers = [term.axes or everyone for term in self._terms_in(unit)]
                prices = [fmean(weights[axis] for axis in axes) for axes in sharers]
            if through is not None:
                counted = self._counted(unit, through)
                prices = [c * p for c, p in zip(counted, prices or repeat(1.0), strict=False)]
            self._polynomials[key] = self._compiled(unit, device).total(prices)
        return self._polynomials[key]

    def _compiled(self, unit: str, device: torch.device) -> Terms:
        if (unit, device) not in self._on_device:
            terms = self._terms_in(unit)  # first: the sums are complete only once these are known
            if device not in self._tables:
                self._tables[device] = SumTable(self._sums, device)
            self._on_device[unit, device] = Terms(
                self._tables[device],
                [term.monomial for term in terms],
                [term.coefficient for term in terms],
                device,
            )
        return self._on_device[unit, device]

    @cached_property
    def _sums(self) -> Sums:
        return Sums(self.plan, (dim for cost in self.costs for dim in cost.dims))

    def _terms_in(self, unit: str) -> list[_Term]:
        return self._terms.get(unit, [])

    @cached_property
    def _terms(self) -> dict[str, list[_Term]]:
        """The expected counts as polynomials, with equal terms of one module merged."""
        merged: dict[str, dict[tuple[str, frozenset[int], Monomial], float]] = {
            cost.unit: defaultdict(float) for cost in self.costs
        }
        for cost in self.costs:
            for axes, monomial, coefficient in expanded(self._sums, cost.scale, cost.dims):
                merged[cost.unit][cost.owner, axes, monomial] += coefficient
        return {unit: [_Term(*k, value) for k, value in of.items()] for unit, of in merged.items()}


def expanded(
    sums: Sums, scale: float, dims: Layouts
) -> Iterator[tuple[frozenset[int], Monomial, float]]:
    """Yield ``scale × E[Π open size]`` as monomials in sums: axes, factors, coefficient."""
    counts = multiply([sums.size(dim) for dim in dims])
    for counted, times in counts.items():
        axes = sums.axes(counted)
        for monomial, coefficient in sums.expectation(counted).items():
            yield axes, monomial, scale * times * coefficient


_known: WeakValueDictionary[int, CostModel] = WeakValueDictionary()


def cost_of(plan: Plan) -> CostModel:
    """Return the plan's cost model, shared while any caller holds a reference to it."""
    found = _known.get(id(plan))
    if found is None or found.plan is not plan:
        found = _known[id(plan)] = CostModel(plan)
    return found


def reachable(costs: Iterable[Cost]) -> float:
    """Return the share of the dense count of these terms that axes can remove, from 0 to 1."""
    total = whole = 0.0
    for cost in costs:
        total += cost.scale * prod(dim.size for dim in cost.dims)
        whole += cost.scale * prod(map(constant_positions, cost.dims))
    return (total - whole) / total if total else 0.0


def group_weights(plan: Plan, axis_weights: Sequence[float] | None = None) -> Tensor:
    """Return |g| of each gate (eq. 16), times its axis' weight; float64, ``(plan.size,)``, CPU."""
    weights = axis_weights or [1.0] * len(plan.axes)
    return torch.cat(
        [
            torch.full((axis.size,), axis.group_size * weight, dtype=torch.float64)
            for axis, weight in zip(plan.axes, weights, strict=True)
        ]
    )


class Amounts:
    """Expected sizes of costs or activations under a plan's gates, exact for independent gates.

    Args:
        plan: whose gates these are.
        things: such as ``plan.costs`` or ``plan.activations``.

    Raises:
        UsageError: ``things`` is empty.
    """

    def __init__(self, plan: Plan, things: Iterable[Cost | Activation]) -> None:
        self._things = tuple(things)
        if not self._things:
            raise UsageError(
                "there is nothing here whose size could be measured. If it is the activations of a "
                "model out of a file: an older l0prune, which did not note them, wrote that. Gate "
                "the model anew"
            )
        self._sums = Sums(plan, (dim for thing in self._things for dim in thing.dims))
        self._monomials: list[Monomial] = []
        self._coefficients: list[float] = []
        lengths = []
        for thing in self._things:
            before = len(self._monomials)
            for _, monomial, coefficient in expanded(self._sums, thing.scale, thing.dims):
                self._monomials.append(monomial)
                self._coefficients.append(coefficient)
            lengths.append(len(self._monomials) - before)
        self._lengths = torch.tensor(lengths, dtype=torch.int64)
        self._on_device: dict[torch.device, tuple[Terms, Tensor]] = {}

    def expected(self, p: Tensor, through: Axes = None) -> Tensor:
        """Return the expected size of each thing at open probabilities ``p``, differentiable.

        Args:
            p: P(z ≠ 0) of each gate, shape ``(plan.size,)``; 0 and 1 for a model that is known.
            through: count only what these axes could take away; None to count everything.

        Returns:
            float64 (float32 on Apple's GPUs), shape ``(things,)``.
        """
        if p.device not in self._on_device:
            table = SumTable(self._sums, p.device)
            terms = Terms(table, self._monomials, self._coefficients, p.device)
            self._on_device[p.device] = terms, self._lengths.to(p.device)
        terms, lengths = self._on_device[p.device]
        sizes = torch.segment_reduce(terms.each(p), "sum", lengths=lengths, unsafe=True)
        if through is None:
            return sizes
        met = (any(not through.isdisjoint(axes_of(d)) for d in each.dims) for each in self._things)
        return sizes * sizes.new_tensor([float(each) for each in met])
