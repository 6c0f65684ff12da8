"""A sum of products of sums over gates, with its gradient, in a fixed handful of tensor operations.

However many layers a model has, one evaluation costs the same number of operations, all on one
flat vector of open probabilities. Sums are segment reductions in float64 over indices in a fixed
order, so that a run repeats to the bit, on a GPU as well.

Backward passes that can be differentiated no further, without a cost to those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from l0prune.plan.moments import Monomial, Sums


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, entered only where someone builds a graph of the gradient.

    Elsewhere autograd is off already, and switching it off once more would cost a small model
    more than the pass itself.
    """
    guarded = once_differentiable(backward)

    def apply(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return apply


_SMALL = 128  # sums, up to which a product with a dense matrix costs no more than one operation


class SumTable:
    """The values of all sums of a ``Sums``, and the way back from their gradients to gates.

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
    """The sums of products of open probabilities: positions of a ``Both``, cumulants."""

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
    """A polynomial in the sums of a ``SumTable``: a coefficient and a few factors a term.

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

    def gradient(self, p: Tensor, of_terms: Tensor) -> Tensor:
        """dL/dp from the gradients dL/d(term); shapes ``(gates,)`` and ``(terms,)``."""
        partial = products_of_others(self.coefficients * of_terms, self._gathered(p))
        of_sums = self._collect(torch.cat(partial))
        return self._table.gradient(p.to(of_sums.dtype), of_sums)

    def _gathered(self, p: Tensor) -> list[Tensor]:
        """The factors of each term, column by column."""
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


Form = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From the sums to the value of a polynomial in them and its gradient, shape ``(sums,)``."""


def _quadratic(columns: Sequence[Tensor], coefficients: Tensor, size: int) -> Form:
    """A polynomial of degree 2 as xᵀMx: products with small matrices."""
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
        self._table, self._form = table, form

    def __call__(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """The value as a scalar of ``dtype`` that autograd can differentiate by ``p``."""
        value: Tensor = _Evaluate.apply(p, self, dtype)
        return value

    def value_and_gradient(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The value at ``p`` and its derivative by each gate, shape ``(gates,)``."""
        sums = self._table.values(p)
        value, of_sums = self._form(sums)
        return value, self._table.gradient(p, of_sums)


class _Evaluate(Function):
    """One node of the graph; the gradient is known before anybody asks for it."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, polynomial: SumPolynomial, dtype: torch.dtype) -> Tensor:
        value, gradient = polynomial.value_and_gradient(p.to(precision(p.device)))
        ctx.gradient = gradient.to(p.dtype)
        return value.to(dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.gradient, None, None


class Collector:
    """Adds up the entries of a vector that share an index, always in the same order."""

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
    """Counts run to 10^10 and more, so float64; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64
