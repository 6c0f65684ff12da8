"""Expected sizes under independent gates: exact, as polynomials in sums over gates, with gradients.

The size of a layout is a polynomial in *counts*: how many slots of a range are open, or how many
positions of a ``Gated``. Gates are independent, so the expectation of a product of counts of
different ranges is the product of their expectations. Counts that share gates (a Linear that
reads and writes one residual stream) are expanded by the moment-cumulant formula

    E[X₁ ⋯ Xₙ] = Σ over set partitions π of Π over blocks B of π of κ(B),

and a joint cumulant κ of sums is the sum of the cumulants of those summands that are connected
through common gates: all others vanish. For one count, κ(N, N) = Σ p(1−p), hence
E[N²] = (Σp)² + Σ p(1−p).

However many layers a model has, one evaluation costs the same number of operations, all on one
flat vector of open probabilities. Sums are segment reductions in float64 over indices in a fixed
order, so that a run repeats to the bit, on a GPU as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, product
from math import factorial, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from l0prune.plan.layout import (
    Cat,
    Const,
    Gated,
    Layout,
    Pick,
    Prod,
    Slots,
    axes_of,
    children,
    distinct,
    leaves,
)
from l0prune.plan.plan import Plan

Monomial = tuple[int, ...]
"""Numbers of the sums that are multiplied with each other, in ascending order."""

Polynomial = dict[Monomial, float]
"""A coefficient for each monomial; the empty one is the constant."""


class Sums:
    """A growing table of sums over gates, in which expected sizes are polynomials.

    Sum 0 is the constant 1; sums 1 to ``len(lengths)`` run over consecutive ranges of the flat
    gate vector; the others are sums of products of open probabilities, given by ``rows``.

    Attributes:
        lengths: how many gates each range has; together they cover the flat vector.
        rows: for each later sum, indices into the flat vector, shape ``(terms, factors)``, where
            ``plan.size`` means 1, and the terms' coefficients, shape ``(terms,)``.
    """

    def __init__(self, plan: Plan, layouts: Iterable[Layout]) -> None:
        self._plan = plan
        self._cuts = _cuts(plan, layouts)
        self._ranges: dict[tuple[int, int], int] = {}
        self.lengths: list[int] = []
        for axis, cuts in zip(plan.axes, self._cuts, strict=True):
            for start, stop in pairwise(cuts):
                self.lengths.append(stop - start)
                self._ranges[axis.start + start, axis.start + stop] = len(self.lengths)
        self.rows: list[tuple[Tensor, Tensor]] = []
        self._axes: dict[int, frozenset[int]] = {}
        self._positions: dict[int, Tensor] = {}
        for (start, stop), number in self._ranges.items():
            self._positions[number] = torch.arange(start, stop).unsqueeze(1)
        axis_of_each_range = (axis for axis, cuts in enumerate(self._cuts) for _ in cuts[1:])
        for number, axis_number in enumerate(axis_of_each_range, start=1):
            self._axes[number] = frozenset([axis_number])
        self._one_by_one: dict[Gated | Pick, int] = {}
        self._cumulants: dict[Monomial, int] = {}
        self._expectations: dict[Monomial, Polynomial] = {}

    def __len__(self) -> int:
        return 1 + len(self.lengths) + len(self.rows)

    def axes(self, monomial: Monomial) -> frozenset[int]:
        """Numbers of the axes whose gates the counts of a monomial depend on."""
        return frozenset(chain.from_iterable(self._axes[number] for number in monomial))

    def size(self, layout: Layout) -> Polynomial:
        """The open size of a layout as a polynomial in counts (not yet in expectations)."""
        match layout:
            case Const(size):
                return {(): float(size)}
            case Slots():
                return {(number,): 1.0 for number in self._pieces(layout)}
            case Cat(parts):
                return _sum(self.size(part) for part in parts)
            case Prod(inner):
                return multiply([self.size(factor) for factor in inner])
            case Gated(base, fine):
                if not axes_of(fine):
                    return self.size(base)
                return self.size(fine) if not axes_of(base) else {(self._counted(layout),): 1.0}
            case Pick(base, _):
                return self.size(base) if layout.is_order else {(self._counted(layout),): 1.0}

    def expectation(self, monomial: Monomial) -> Polynomial:
        """The expected product of counts as a polynomial in the table's sums."""
        found = self._expectations.get(monomial)
        if found is None:
            groups = self._dependent_groups(monomial)
            found = multiply([self._moment(group) for group in groups])
            self._expectations[monomial] = found
        return found

    def _pieces(self, slots: Slots) -> Iterator[int]:
        offset = self._plan.axes[slots.axis].start
        for start, stop in pairwise(self._cuts[slots.axis]):
            if slots.start <= start and stop <= slots.stop:
                yield self._ranges[offset + start, offset + stop]

    def _counted(self, layout: Gated | Pick) -> int:
        """Return the number of the sum that counts a layout's open positions one by one."""
        number = self._one_by_one.get(layout)
        if number is None:
            positions = distinct(self._plan.gate_table(layout).T, self._plan.size)
            number = self._append(positions, torch.ones(len(positions), dtype=torch.float64))
            self._one_by_one[layout] = number
            self._axes[number] = axes_of(layout)
            self._positions[number] = positions
        return number

    def _append(self, indices: Tensor, coefficients: Tensor) -> int:
        self.rows.append((indices, coefficients))
        return len(self) - 1

    def _dependent_groups(self, monomial: Monomial) -> list[Monomial]:
        """Return the counts of a monomial in groups that share no gate with each other."""
        groups: list[Monomial] = []
        for number in monomial:
            touching = [g for g in groups if any(self._share(number, other) for other in g)]
            groups = [g for g in groups if g not in touching]
            groups.append(tuple(sorted(chain([number], *touching))))
        return groups

    def _share(self, one: int, other: int) -> bool:
        if max(one, other) <= len(self.lengths):
            return one == other
        return bool(self._axes[one] & self._axes[other])

    def _moment(self, group: Monomial) -> Polynomial:
        """The expected product of dependent counts: the moment-cumulant formula."""
        result: Polynomial = defaultdict(float)
        for blocks in set_partitions(range(len(group))):
            members = (tuple(group[i] for i in block) for block in blocks)
            result[tuple(sorted(map(self._cumulant, members)))] += 1.0
        return result

    def _cumulant(self, block: Monomial) -> int:
        """Return the number of the sum with the joint cumulant of the counts in ``block``."""
        if len(block) == 1:
            return block[0]
        number = self._cumulants.get(block)
        if number is None:
            one = self._plan.size
            tables = [self._positions[count] for count in block]
            number = self._append(*_cumulant_terms(tables, _connected(tables, one), one))
            self._cumulants[block] = number
        return number


def _cuts(plan: Plan, layouts: Iterable[Layout]) -> list[list[int]]:
    """Divide each axis such that every range in use is a union of pieces."""
    cuts = [{0, axis.size} for axis in plan.axes]
    for slots in chain.from_iterable(map(_counted_leaves, layouts)):
        cuts[slots.axis] |= {slots.start, slots.stop}
    return [sorted(points) for points in cuts]


def _counted_leaves(layout: Layout) -> Iterator[Slots]:
    """Yield the ranges counted as a whole; other layouts are counted position by position."""
    if isinstance(layout, Pick) and not layout.is_order:
        return
    if isinstance(layout, Gated) and axes_of(layout.base) and axes_of(layout.fine):
        return
    if isinstance(layout, Slots):
        yield from leaves(layout)
    for child in children(layout):
        yield from _counted_leaves(child)


def _sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    result: Polynomial = defaultdict(float)
    for polynomial in polynomials:
        for monomial, coefficient in polynomial.items():
            result[monomial] += coefficient
    return result


def multiply(polynomials: Sequence[Polynomial]) -> Polynomial:
    """The product of polynomials; 1 if there are none."""
    result: Polynomial = defaultdict(float)
    for terms in product(*(polynomial.items() for polynomial in polynomials)):
        monomial = tuple(sorted(chain.from_iterable(m for m, _ in terms)))
        result[monomial] += prod(coefficient for _, coefficient in terms)
    return result


def set_partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to divide ``items`` into non-empty blocks."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for blocks in set_partitions(rest):
        yield [[first], *blocks]
        for i, block in enumerate(blocks):
            yield [*blocks[:i], [first, *block], *blocks[i + 1 :]]


def _connected(tables: Sequence[Tensor], one: int) -> Tensor:
    """Return the tuples of positions, one of each table, that are connected through common gates.

    Args:
        tables: the gates of each position, shape ``(positions, gates)``, filled up with ``one``.
        one: index that means no gate.

    Shape: ``(tuples, len(tables))``. A connected tuple stays connected without some member of
    it, so every one is found by joining each member in turn to connected tuples of the others.
    """
    count = len(tables)
    if count == 1:
        return torch.arange(len(tables[0])).unsqueeze(1)
    found = []
    for last in range(count):
        others = [*tables[:last], *tables[last + 1 :]]
        tuples = _connected(others, one)
        gates = torch.cat([t[tuples[:, i]] for i, t in enumerate(others)], dim=1)
        left, right = _matches(gates, tables[last], one)
        joined = torch.cat([tuples[left], right.unsqueeze(1)], dim=1)
        order = [*range(last), count - 1, *range(last, count - 1)]
        found.append(joined[:, order])
    once: Tensor = torch.unique(torch.cat(found), dim=0)
    return once


def _matches(left: Tensor, right: Tensor, one: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of rows of ``left`` and ``right`` that share a gate, as two vectors."""
    sorted_gates, order = right.flatten().sort()
    begin = torch.searchsorted(sorted_gates, left.flatten())
    end = torch.searchsorted(sorted_gates, left.flatten(), right=True)
    counts = torch.where(left.flatten() == one, 0, end - begin)
    owner = torch.arange(left.numel()).repeat_interleave(counts)
    step = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    return owner // left.shape[1], order[begin[owner] + step] // right.shape[1]


def _cumulant_terms(tables: Sequence[Tensor], tuples: Tensor, one: int) -> tuple[Tensor, Tensor]:
    """The joint cumulant of products of gates, summed over ``tuples`` of them.

    κ = Σ over set partitions π of (−1)^(|π|−1) (|π|−1)! Π over blocks of E[product of the block],
    where that expectation is the product over the block's *distinct* gates of p, since z² = z.

    Returns indices, shape ``(terms, factors)``, and coefficients, shape ``(terms,)``.
    """
    gates = [table[tuples[:, i]] for i, table in enumerate(tables)]
    indices, coefficients = [], []
    for blocks in set_partitions(range(len(tables))):
        unions = [distinct(torch.cat([gates[i] for i in block], dim=1), one) for block in blocks]
        indices.append(torch.cat(unions, dim=1).sort(dim=1).values)
        sign = (-1) ** (len(blocks) - 1) * factorial(len(blocks) - 1)
        coefficients.append(torch.full((len(tuples),), float(sign), dtype=torch.float64))
    return torch.cat(indices), torch.cat(coefficients)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Apply torch's ``once_differentiable`` only where a graph of the gradient is built.

    Elsewhere autograd is off already, and switching it off once more would cost a small model
    more than the pass itself.
    """
    guarded = once_differentiable(backward)

    def apply(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return apply


_SMALL = 128  # sums, up to which a product with a dense matrix costs no more than one operation


class SumTable:
    """Values of all sums of a ``Sums``, and gradients of the gates from those of the sums.

    Attributes:
        size: number of sums.
        one: the constant 1 as a vector, in the dtype and on the device of all sums.
    """

    def __init__(self, sums: Sums, device: torch.device) -> None:
        self.size = len(sums)
        self._lengths = torch.tensor(sums.lengths, dtype=torch.int64, device=device)
        self.one = torch.ones(1, dtype=precision(device), device=device)
        self._range_of_gate = torch.repeat_interleave(
            torch.arange(1, 1 + len(sums.lengths), device=device), self._lengths
        )
        self._products = _Products(sums, device) if sums.rows else None

    def values(self, p: Tensor) -> Tensor:
        """Every sum at open probabilities ``p``; shape ``(len(sums),)``."""
        ranges = torch.segment_reduce(p, "sum", lengths=self._lengths, unsafe=True)
        if self._products is None:
            return torch.cat([self.one, ranges])
        return torch.cat([self.one, ranges, self._products.sums(torch.cat([p, self.one]))])

    def gradient(self, p: Tensor, of_sums: Tensor) -> Tensor:
        """dL/dp from the gradients dL/d(sum); shapes ``(gates,)`` and ``(len(sums),)``."""
        gradient = of_sums.index_select(0, self._range_of_gate)
        if self._products is None:
            return gradient
        later = of_sums[1 + len(self._lengths) :]
        return gradient + self._products.gradient(torch.cat([p, self.one]), later)


class _Products:
    """The sums of products of open probabilities: positions of a ``Gated``, cumulants."""

    def __init__(self, sums: Sums, device: torch.device) -> None:
        size = sum(sums.lengths)
        width = max(indices.shape[1] for indices, _ in sums.rows)
        columns = torch.cat(
            [
                torch.nn.functional.pad(indices, (0, width - indices.shape[1]), value=size)
                for indices, _ in sums.rows
            ]
        ).T
        self._columns = [column.contiguous().to(device) for column in columns]
        counts = torch.tensor([len(indices) for indices, _ in sums.rows])
        coefficients = torch.cat([coefficients for _, coefficients in sums.rows])
        self._coefficients = coefficients.to(device, precision(device))
        self._lengths = counts.to(device)
        self._sum_of_row = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
        self._collect = Collector(columns.flatten(), size + 1, device)

    def sums(self, padded: Tensor) -> Tensor:
        """One value per later sum; ``padded`` is p with a 1 at its end."""
        terms = self._coefficients
        for column in self._columns:
            terms = terms * padded.index_select(0, column)
        return torch.segment_reduce(terms, "sum", lengths=self._lengths, unsafe=True)

    def gradient(self, padded: Tensor, of_sums: Tensor) -> Tensor:
        """dL/dp of these sums alone; shape ``(gates,)``."""
        weights = self._coefficients * of_sums.index_select(0, self._sum_of_row)
        gathered = [padded.index_select(0, column) for column in self._columns]
        return self._collect(torch.cat(products_of_others(weights, gathered)))[:-1]


class Terms:
    """A polynomial in the sums of a ``SumTable``: per term a coefficient and a few factors.

    Attributes:
        coefficients: one per term, shape ``(terms,)``.
    """

    def __init__(
        self,
        table: SumTable,
        monomials: Sequence[Monomial],
        coefficients: Sequence[float],
        device: torch.device,
    ) -> None:
        self._table = table
        width = max([1, *map(len, monomials)])
        factors = [[*monomial, *[0] * (width - len(monomial))] for monomial in monomials]
        columns = torch.tensor(factors, dtype=torch.int64).reshape(-1, width).T
        self._columns = [column.contiguous().to(device) for column in columns]
        self._collect = Collector(columns.flatten(), table.size, device)
        self.coefficients = torch.tensor(coefficients, dtype=precision(device), device=device)

    def values(self, p: Tensor) -> Tensor:
        """The value of each term at ``p``, without gradient; shape ``(terms,)``."""
        result = self.coefficients
        for factor in self._gathered(p.detach()):
            result = result * factor
        return result

    def each(self, p: Tensor) -> Tensor:
        """Return the value of each term, differentiable in ``p``; shape ``(terms,)``."""
        values: Tensor = _EachTerm.apply(p, self)
        return values

    def gradient(self, p: Tensor, of_terms: Tensor) -> Tensor:
        """dL/dp from the gradients dL/d(term); shapes ``(gates,)`` and ``(terms,)``."""
        partial = products_of_others(self.coefficients * of_terms, self._gathered(p))
        of_sums = self._collect(torch.cat(partial))
        return self._table.gradient(p.to(of_sums.dtype), of_sums)

    def _gathered(self, p: Tensor) -> list[Tensor]:
        sums = self._table.values(p.to(self.coefficients.dtype))
        return [sums.index_select(0, column) for column in self._columns]

    def total(self, prices: Sequence[float] | None = None) -> SumPolynomial:
        """The sum of all terms, each times its price, ready to evaluate and differentiate."""
        coefficients = self.coefficients
        if prices is not None:
            coefficients = coefficients * coefficients.new_tensor(prices)
        if len(self._columns) <= 2 and self._table.size <= _SMALL:
            return SumPolynomial(
                self._table, _quadratic(self._columns, coefficients, self._table.size)
            )

        def evaluate(sums: Tensor) -> tuple[Tensor, Tensor]:
            gathered = [sums.index_select(0, column) for column in self._columns]
            partial = products_of_others(coefficients, gathered)
            value = torch.dot(partial[0], gathered[0])
            return value, self._collect(torch.cat(partial))

        return SumPolynomial(self._table, evaluate)


class _EachTerm(Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, terms: Terms) -> Tensor:
        ctx.terms = terms
        ctx.save_for_backward(p)
        return terms.values(p)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        return ctx.terms.gradient(p, grad).to(p.dtype), None


Form = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function of the sums that returns a polynomial's value and gradient, shape ``(sums,)``."""


def _quadratic(columns: Sequence[Tensor], coefficients: Tensor, size: int) -> Form:
    """Return a polynomial of degree 2 as the form xᵀMx, evaluated with small dense matrices."""
    first, last = columns[0], columns[-1] if len(columns) == 2 else torch.zeros_like(columns[0])
    matrix = coefficients.new_zeros(size, size)
    matrix.index_put_((first, last), coefficients, accumulate=True)
    symmetric = matrix + matrix.T

    def evaluate(sums: Tensor) -> tuple[Tensor, Tensor]:
        return torch.dot(torch.mv(matrix, sums), sums), torch.mv(symmetric, sums)

    return evaluate


class SumPolynomial:
    """A form over a table of sums: the expected cost as a function of open probabilities."""

    def __init__(self, table: SumTable, form: Form) -> None:
        self.table, self.form = table, form

    def __call__(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """The value as a scalar of ``dtype`` that autograd can differentiate by ``p``."""
        value: Tensor = _Evaluate.apply(p, self, dtype)
        return value


class _Evaluate(Function):
    """Autograd node of a sum polynomial; the forward already computes the gradient."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, polynomial: SumPolynomial, dtype: torch.dtype) -> Tensor:
        precise = p.to(precision(p.device))
        value, of_sums = polynomial.form(polynomial.table.values(precise))
        ctx.gradient = polynomial.table.gradient(precise, of_sums).to(p.dtype)
        return value.to(dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.gradient, None, None


class Collector:
    """Sums of the entries of a vector that share an index, always in the same order."""

    def __init__(self, index: Tensor, size: int, device: torch.device) -> None:
        self._order = torch.argsort(index, stable=True).to(device)
        self._lengths = torch.bincount(index, minlength=size).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """Sums by index; shape ``(size,)``, 0 where an index does not occur."""
        ordered = values.index_select(0, self._order)
        return torch.segment_reduce(ordered, "sum", lengths=self._lengths, unsafe=True)


def products_of_others(first: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """For each factor: ``first`` times all the other factors, without dividing by it."""
    before = [first]
    for factor in factors[:-1]:
        before.append(before[-1] * factor)
    result = [before[-1]]
    after = factors[-1]
    for number in range(len(factors) - 2, -1, -1):
        result.append(before[number] * after)
        after = after * factors[number] if number else after
    return result[::-1]


def precision(device: torch.device) -> torch.dtype:
    """Return float64, as counts reach 10^10 and more; float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
