"""What torch decides by a size, decided such that the graph is right for other sizes too.

Into how many pieces a tensor is split is a number, also where its size and that of a piece are
symbols: ``torch.cat(x.split(4, 2), 0).split(x.size(0), 0)`` makes as many as there were. torch asks
for them in a way of which its symbols do not know that. And ``torch.cdist`` multiplies matrices
where there are more than 25 points, which takes less time, and computes the same less exactly.
Recurrent layers are traced step by step (``recurrent``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.overrides import TorchFunctionMode

from l0prune.capture import recurrent
from l0prune.capture.compat import size_expression

_IF_MANY = "use_mm_for_euclid_dist_if_necessary"
_MANY = 25  # torch's own number


class AnySize(TorchFunctionMode):
    """Within the context, symbolic sizes stay symbols in these functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, or one that computes the same."""
        instead = _INSTEAD.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        return instead(func, *args, **(kwargs or {}))


def _split(
    func: Callable[..., Any],
    tensor: Tensor,
    split_size_or_sections: Any = None,
    dim: int = 0,
    **by: Any,
) -> Any:
    """Pieces of one size."""
    size = by.get("split_size", split_size_or_sections)
    if isinstance(size, int | SymInt) and _is_symbolic(tensor.shape[dim], size):
        number = _number(tensor.shape[dim] // size)
        if number and _is_equal(number * size, tensor.shape[dim]):
            return tensor.split([size] * number, dim)
    return func(tensor, size, dim)


def _chunk(func: Callable[..., Any], tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    """As many pieces."""
    size = tensor.shape[dim] // chunks if _is_symbolic(tensor.shape[dim]) else 0
    if _is_symbolic(size) and _is_equal(size * chunks, tensor.shape[dim]):
        return tensor.split([size] * chunks, dim)
    return func(tensor, chunks, dim)


def _cdist(
    func: Callable[..., Any],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = _IF_MANY,
) -> Any:
    """The distances between points, of which there may be any number."""
    points = (x1.shape[-2], x2.shape[-2])
    if compute_mode == _IF_MANY and _is_symbolic(*points):
        are_many = any(not _is_symbolic(size) and size > _MANY for size in points)
        compute_mode = f"{'use' if are_many else 'donot_use'}_mm_for_euclid_dist"
    return func(x1, x2, p=p, compute_mode=compute_mode)


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.split: _split,
    Tensor.split: _split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.cdist: _cdist,
    **recurrent.INSTEAD,
}


def _is_symbolic(*sizes: Any) -> bool:
    return any(isinstance(size, SymInt) and _number(size) is None for size in sizes)


def _number(size: int | SymInt) -> int | None:
    """The number that a size is, if it is one."""
    if not isinstance(size, SymInt):
        return size
    expression = size_expression(size)
    return int(expression) if expression.is_number else None


def _is_equal(size: int | SymInt, other: int | SymInt) -> bool:
    """Are both the same for all values of their symbols?"""
    return bool(size_expression(size) == size_expression(other))
