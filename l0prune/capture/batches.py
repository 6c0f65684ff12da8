"""The batch: how large it is, and which sizes of it a graph is for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes, Inputs, fields_of, is_registered


@dataclass(frozen=True)
class Batches:
    """Sizes of a batch.

    Attributes:
        least: the smallest one.
        multiple: of which they all are: of as many as the frames of a clip, where a model takes
            frames.
    """

    least: int = 1
    multiple: int = 1

    def __contains__(self, size: int) -> bool:
        return size >= self.least and size % self.multiple == 0

    def __str__(self) -> str:
        if self.multiple == 1:
            return f"{self.least} or more"
        start = f", from {self.least}" if self.least > self.multiple else ""
        return f"multiples of {self.multiple}{start}"

    def first(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch sizes of ``groups`` steps each, as far as they are allowed."""
        return tuple(n * self.multiple for n in groups if n * self.multiple in self)

    def several(self) -> Batches:
        """Return the batches without the smallest, a case of its own to torch.export."""
        return Batches(2 * self.multiple, self.multiple)

    @property
    def dim(self) -> Any:
        """Return the batches as a ``torch.export.Dim``."""
        if self.multiple == 1:
            return Dim("batch", min=self.least if self.least > 1 else None)
        return self.multiple * Dim("_batch", min=max(self.least // self.multiple, 1))


ANY = Batches()


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of dim 0 of the first tensor input; 0 where there is none."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return 0


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any], batches: Batches = ANY
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs, doubled if the batch is the smallest: torch.export fixes a size of 1."""
    size = batch_of(args, kwargs)
    if size != batches.multiple:
        return args, kwargs

    def twice(leaf: Any) -> Any:
        is_batched = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size
        return torch.cat([leaf, leaf]) if is_batched else leaf

    wide_args, wide_kwargs = pytree.tree_map(twice, (args, kwargs))
    return wide_args, wide_kwargs


def batch_shapes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batches: Batches | None = ANY,
    free: FreeSizes = ALL_FIXED,
) -> Any:
    """``dynamic_shapes`` for torch.export: one symbolic batch, if any, over every batched input.

    Of the ``free`` sizes torch.export finds out itself how they hang together.
    """
    size, batch = batch_of(args, kwargs), {0: batches.dim} if batches else {}

    numbers = count()

    def shape(leaf: Any) -> Any:
        number = next(numbers)
        if not isinstance(leaf, Tensor):
            return None
        dims: dict[int, Any] = dict.fromkeys(free.of(number), Dim.AUTO)
        return dims | (batch if leaf.ndim and leaf.shape[0] == size else {})

    return shapes_in((args, kwargs), model, shape)


def shapes_in(example: Inputs, model: nn.Module, shape: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the ``dynamic_shapes`` of torch.export that have ``shape(leaf)`` for each leaf.

    An object of a class that is registered with torch becomes a list of its fields.
    """

    def of(value: Any) -> Any:
        return mapped(fields_of(value)) if is_registered(value) else shape(value)

    def mapped(value: Any) -> Any:
        return pytree.tree_map(of, value, is_leaf=is_registered)

    args, kwargs = (mapped(each) for each in example)
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments
