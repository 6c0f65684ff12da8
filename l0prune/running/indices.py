"""Index ranges, checked before an operator reads by index.

On a GPU an index beyond the end fails inside a kernel: the error names neither operator nor index,
and every later call of the process on that GPU fails, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import TorchDispatchMode, uncompiled

_ATEN = torch.ops.aten
# Name, index tensor, and the first and last valid index.
_Range = tuple[str, Any, int, int]


@contextmanager
def checked_indices() -> Iterator[None]:
    """Raise an IndexError within the context before an operator reads beyond the end.

    Compiled code runs uncompiled within: else its operators would not be seen, and torch refuses
    to compile whole graphs (``fullgraph=True``) under a dispatch mode.
    """
    with uncompiled(), _Checked():
        yield


class _Checked(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check the indices of the operator, and run it."""
        ranges = _RANGES.get(getattr(func, "overloadpacket", None))
        for each in ranges(*args) if ranges is not None else ():
            _check(*each)
        return func(*args, **(kwargs or {}))


def _check(name: str, indices: Any, first: int, last: int) -> None:
    if type(indices) not in (Tensor, nn.Parameter) or indices.is_meta or not indices.numel():
        return
    for value in map(int, indices.aminmax()):
        if not first <= value <= last:
            raise IndexError(f"{value} is out of bounds: {name} go from 0 to {last} here")


def _classes(
    scores: Tensor, targets: Tensor, weight: Any, reduction: int, ignored: int
) -> list[_Range]:
    count = scores.shape[0 if scores.dim() == 1 else 1]
    return [("class numbers", targets[targets != ignored], 0, count - 1)]


def _rows(weight: Tensor, indices: Tensor, *_: Any) -> list[_Range]:
    return [("indices of an embedding", indices, 0, len(weight) - 1)]


def _along_dim(values: Tensor, dim: int, indices: Tensor, *_: Any) -> list[_Range]:
    size = values.shape[dim] if values.dim() else 1
    return [("indices", indices, 0, size - 1)]


def _of_each_dim(values: Tensor, indices: Sequence[Tensor | None], *_: Any) -> list[_Range]:
    """Return the ranges of ``values[indices]``, up to a mask, which spans several dims."""
    found: list[_Range] = []
    for size, each in zip(values.shape, indices, strict=False):
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            break
        found.append(("indices", each, -size, size - 1))
    return found


_RANGES: dict[Any, Callable[..., list[_Range]]] = {
    _ATEN.nll_loss_forward: _classes,
    _ATEN.nll_loss2d_forward: _classes,
    _ATEN.embedding: _rows,
    _ATEN._embedding_bag: _rows,
    _ATEN._embedding_bag_forward_only: _rows,
    _ATEN.gather: _along_dim,
    _ATEN.index_select: _along_dim,
    _ATEN.scatter: _along_dim,  # also of one_hot
    _ATEN.scatter_: _along_dim,
    _ATEN.index: _of_each_dim,
    _ATEN.index_put: _of_each_dim,
    _ATEN.index_put_: _of_each_dim,
}
