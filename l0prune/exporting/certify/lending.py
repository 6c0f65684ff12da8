"""A model in another dtype that borrows its weights, so that no second set of them is held.

A weight is converted where an operator reads it, and let go of when that operator is done: while a
network runs in float64, there is never more than one layer of it in that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l0prune.capture.compat import no_torch_function, schema_of, shell
from l0prune.capture.copying import Model, copied
from l0prune.exporting.slicing.dtypes import follow

_DETACH = torch.ops.aten.detach.default


def lent(model: Model, dtype: torch.dtype | None = None) -> Model:
    """A copy on the CPU that computes in ``dtype`` or as it is, to be run and thrown away.

    Its parameters are the model's own to read; what it writes into them it keeps to itself.
    """
    borrowed = {
        id(p): _borrowed(p, dtype or p.dtype) for p in model.parameters() if _can_be_lent(p)
    }
    result = copied(model, borrowed)
    return result.cpu() if dtype is None else follow(result, dtype)


def read_of(borrower: nn.Module) -> frozenset[str]:
    """Of the parameters that were lent to this copy, the names of those that it has read."""
    named = borrower.named_parameters()
    return frozenset(name for name, p in named if isinstance(p, Lent) and p.loan.is_read)


def _can_be_lent(parameter: nn.Parameter) -> bool:
    """Is it an ordinary tensor of floats?"""
    is_float = parameter.is_floating_point() and parameter.device.type == "cpu"
    return type(parameter) is nn.Parameter and is_float and parameter.layout == torch.strided


def _borrowed(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    result = nn.Parameter(Lent(_Loan(parameter.detach(), dtype)), parameter.requires_grad)
    vars(result).update(vars(parameter))
    return result


class _Loan:
    """What is lent, and what has become of it."""

    def __init__(self, original: Tensor, dtype: torch.dtype) -> None:
        self.original = original
        self.dtype = dtype
        self.own: Tensor | None = None
        self.is_read = False

    def read(self) -> Tensor:
        """The values, in the borrower's dtype."""
        self.is_read = True
        return self.original.to(self.dtype) if self.own is None else self.own

    def written(self) -> Tensor:
        """A copy of the values that the borrower keeps, since it writes into them."""
        if self.own is None:
            self.own = self.original.to(self.dtype, copy=True)
        return self.own


class Lent(Tensor):
    """Looks like a tensor of the borrower's dtype; holds the lender's."""

    loan: _Loan

    @staticmethod
    def __new__(cls: type[Lent], loan: _Loan) -> Lent:
        """A tensor without a memory of its own, as large as what is lent."""
        result: Lent = shell(cls, loan.original, loan.dtype)
        result.loan = loan
        return result

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator on the values themselves."""
        if func is _DETACH:
            return Lent(args[0].loan)
        writes = schema_of(func).is_mutable

        def values(leaf: Lent) -> Tensor:
            return leaf.loan.written() if writes else leaf.loan.read()

        plain_args, plain_kwargs = pytree.tree_map_only(Lent, values, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        is_first = bool(args) and isinstance(args[0], Lent) and result is plain_args[0]
        return args[0] if is_first else result
