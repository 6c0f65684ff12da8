"""Parameters without memory of their own, whose values are computed when an operator reads them.

A model in another dtype borrows its weights: each is converted when an operator reads it, and freed
when that operator is done. The weights of a small model are folded with their gates in float64 in
the same way. While a network runs in float64, never more than one layer of it is in that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn

from l0prune.capture.compat import (
    OpOverload,
    TorchDispatchMode,
    no_torch_function,
    pytree,
    schema_of,
    shell,
)
from l0prune.capture.last_place import moved

Fold = Callable[[Tensor], Tensor]
_DETACH = torch.ops.aten.detach.default


class _Loan:
    """Lent parameter: the stored values and the state of the loan.

    Attributes:
        original: the values as stored.
        dtype: the borrower's.
        fold: computes the values from a float64 copy, in place; None for the values as stored.
        own: the borrower's copy once it has written; None until then.
        is_read: whether an operator has read it.
    """

    def __init__(self, original: Tensor, dtype: torch.dtype, fold: Fold | None = None) -> None:
        self.original = original
        self.dtype = dtype
        self.fold = fold
        self.own: Tensor | None = None
        self.is_read = False

    def made(self, *, copy: bool) -> Tensor:
        """Compute the values in the borrower's dtype."""
        if self.own is not None:
            return self.own.clone() if copy else self.own
        if self.fold is None:
            return self.original.to(self.dtype, copy=copy)
        return self.fold(self.original.to(torch.float64, copy=True)).to(self.dtype)

    def given(self, dtype: torch.dtype, device: torch.device | None = None) -> _Loan:
        """Return a new loan of the same values in another dtype, or on another device."""
        loan = _Loan(self.original.to(device), dtype, self.fold)
        loan.own = None if self.own is None else self.own.to(device, dtype)
        return loan

    def rest_on(self, other: Tensor) -> None:
        """Lend another tensor in the place of the stored values, if the values are the same."""
        if self.own is None and torch.equal(self.made(copy=False), other.to(self.dtype)):
            self.original, self.fold = other, None

    def read(self) -> Tensor:
        """Return the values for an operator, and record that they were read."""
        self.is_read = True
        return self.made(copy=False)

    def written(self) -> Tensor:
        """Return the borrower's copy of the values, for an operator that writes into them."""
        self.own = self.made(copy=self.own is None)
        return self.own


class Lent(Tensor):
    """Tensor subclass with the borrower's dtype that holds a loan instead of memory."""

    loan: _Loan

    @staticmethod
    def __new__(cls: type[Lent], loan: _Loan) -> Lent:
        """Make a tensor without memory, of the lent tensor's shape."""
        result: Lent = shell(cls, loan.original, loan.dtype)
        result.loan = loan
        return result

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return another loan of the same stored values; a written copy is cloned."""
        loan = self.loan.given(self.loan.dtype)
        loan.own = None if loan.own is None else loan.own.clone()
        result: Tensor = Lent(loan)
        if isinstance(self, nn.Parameter):
            result = _as_parameter(result, self)
        memo[id(self)] = result
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator on the computed values."""
        if func is _DETACH:
            return Lent(args[0].loan)
        writes = schema_of(func).is_mutable

        def values(leaf: Lent) -> Tensor:
            return leaf.loan.written() if writes else _value(leaf)

        plain_args, plain_kwargs = pytree.tree_map_only(Lent, values, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        is_first = bool(args) and isinstance(args[0], Lent) and result is plain_args[0]
        return args[0] if is_first else result


def _value(lent: Lent) -> Tensor:
    return lent.loan.read()


_LOOPS = ("cond", "while_loop", "scan", "associative_scan", "map_impl")


class Borrowing(TorchDispatchMode):
    """Context in which control flow and compiled functions take lent tensors.

    ``torch.cond``, ``while_loop`` and ``scan`` know no subclass of tensors: they get the values,
    and their branches run under this mode, too. torch.compile cannot trace lent tensors: what is
    compiled runs as it is written.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._branches = 0  # that are running, one in another

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run inside, which ``flex_attention`` requires."""
        return True

    def __enter__(self) -> Self:
        self._stance = torch.compiler.set_stance("force_eager")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stance.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator; one that calls functions gets plain tensors."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            args, kwargs = pytree.tree_map_only(Lent, _value, (args, kwargs))
        elif self._branches:  # autograd, which splits operators outside, is off in a branch
            with self._again():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if getattr(func, "__name__", "") in _LOOPS:
            args = tuple(self._inside(each) if callable(each) else each for each in args)
        return func(*args, **kwargs)

    def _inside(self, branch: Callable[..., Any]) -> Callable[..., Any]:
        """Return the branch of an operator as a function that runs under this mode."""

        def run(*args: Any) -> Any:
            self._branches += 1
            try:
                with self._again():
                    return branch(*args)
            finally:
                self._branches -= 1

        return run

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Context in which the mode acts while it handles an operator."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)


def _as_parameter(tensor: Tensor, like: nn.Parameter) -> nn.Parameter:
    result = nn.Parameter(tensor, like.requires_grad)
    vars(result).update({name: value for name, value in vars(like).items() if name != "loan"})
    return result


def borrowed(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter | None:
    """Return a lent parameter for ``parameter``; None unless that is a plain dense float tensor."""
    if isinstance(parameter, Lent):
        loan = parameter.loan
        return _as_parameter(Lent(_Loan(loan.original, dtype or loan.dtype, loan.fold)), parameter)
    is_float = parameter.is_floating_point() and not parameter.is_meta
    if type(parameter) is not nn.Parameter or not is_float or parameter.layout != torch.strided:
        return None
    return _as_parameter(Lent(_Loan(parameter.detach(), dtype or parameter.dtype)), parameter)


def folded(stored: Tensor, fold: Fold) -> Tensor:
    """Return a float64 tensor computed on reading: ``fold`` applied to a copy of ``stored``.

    Nobody else may write to ``stored``.
    """
    return Lent(_Loan(stored, torch.float64, fold))


def settle(module: nn.Module, dtype: torch.dtype | None, twin: nn.Module | None = None) -> None:
    """Replace a module's lent parameters by ordinary ones, in place; originals are released.

    Args:
        dtype: None for the dtypes that they have.
        twin: a copy of the module, whose parameters then borrow the ordinary ones, where these have
            the same values.
    """
    pairs = () if twin is None else zip(module.parameters(), twin.parameters(), strict=True)
    twins = {id(mine): other for mine, other in pairs}

    def own(old: Lent) -> Tensor:
        loan = old.loan.given(dtype or old.dtype)
        made = loan.made(copy=True)
        if isinstance(other := twins.get(id(old)), Lent):
            other.loan.rest_on(made)
        return made

    _replace(module, own)


def move(module: nn.Module, device: torch.device) -> None:
    """Move the stored values of a module's lent parameters to a device; they stay lent."""
    _replace(module, lambda old: Lent(old.loan.given(old.dtype, device)))


def _replace(module: nn.Module, make: Callable[[Lent], Tensor]) -> None:
    """Replace all lent parameters of a module in place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if isinstance(old, Lent):
                if id(old) not in made:
                    made[id(old)] = _as_parameter(make(old), old)
                part._parameters[name] = made[id(old)]


def move_values(module: nn.Module, seed: int) -> None:
    """Move a module's lent values by one unit in the last place of float32, in place."""
    seeds = count(seed)

    def near(old: Lent) -> Tensor:
        loan, own_seed = old.loan.given(old.dtype), next(seeds)
        fold = loan.fold or (lambda values: values)
        loan.fold = lambda values: moved(fold(values), own_seed).double()
        return Lent(loan)

    _replace(module, near)


def read_of(borrower: nn.Module) -> frozenset[str]:
    """Return the names of the lent parameters that this copy of a model has read."""
    named = borrower.named_parameters()
    return frozenset(name for name, p in named if isinstance(p, Lent) and p.loan.is_read)
