"""Many expected sizes at once, each on its own: what a sum of all of them does not tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from l0prune.cost.expected import SumTable, Terms, precision
from l0prune.cost.first_order import first_order
from l0prune.cost.model import Axes, expanded
from l0prune.cost.moments import Monomial, Sums
from l0prune.errors import UsageError
from l0prune.plan.activations import Activation
from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Cost, Plan


class Amounts:
    """The expected sizes of some things under the gates of a plan, exact for independent gates.

    Args:
        plan: whose gates these are.
        things: such as ``plan.costs`` or ``plan.activations``.

    Raises:
        UsageError: there are none.
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
        self._on_device: dict[torch.device, _OnDevice] = {}

    def expected(self, p: Tensor, through: Axes = None) -> Tensor:
        """The expected size of each thing at open probabilities ``p``, differentiable.

        Args:
            p: P(z ≠ 0) of each gate, shape ``(plan.size,)``; 0 and 1 for a model that is known.
            through: count only what these axes could take away; None to count everything.

        Returns:
            float64 (float32 on Apple's GPUs), shape ``(things,)``.
        """
        if p.device not in self._on_device:
            self._on_device[p.device] = _OnDevice(self, p.device)
        sizes: Tensor = _Each.apply(p, self._on_device[p.device])
        if through is None:
            return sizes
        return sizes * sizes.new_tensor([self._meets(thing, through) for thing in self._things])

    def _meets(self, thing: Cost | Activation, axes: frozenset[int]) -> float:
        return float(any(not axes.isdisjoint(axes_of(dim)) for dim in thing.dims))


class _OnDevice:
    """The terms of all things as tensors, those of one thing next to each other."""

    def __init__(self, amounts: Amounts, device: torch.device) -> None:
        table = SumTable(amounts._sums, device)
        self.terms = Terms(table, amounts._monomials, amounts._coefficients, device)
        self.lengths = amounts._lengths.to(device)
        count = len(self.lengths)
        self.thing_of_term = torch.repeat_interleave(
            torch.arange(count, device=device), self.lengths
        )


class _Each(Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, on_device: _OnDevice) -> Tensor:
        ctx.on_device = on_device
        ctx.save_for_backward(p)
        values = on_device.terms.values(p)
        sizes = torch.segment_reduce(values, "sum", lengths=on_device.lengths, unsafe=True)
        return sizes.to(precision(p.device))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        of_terms = grad.index_select(0, ctx.on_device.thing_of_term)
        return ctx.on_device.terms.gradient(p, of_terms).to(p.dtype), None
