"""Places where a tensor is cut: what is left of it, and how it becomes whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Place:
    """Place where a tensor of the model was cut.

    All that belongs to the tensor (gradient, moments, averages) lies in memory as it does: fused
    optimizers refuse anything else.

    Attributes:
        shape: of the whole tensor.
        stride: of the same.
        left: for each dim the positions that are left, or None for all.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    left: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, tensor: Tensor, left: tuple[Tensor | None, ...]) -> Place:
        """The place of a whole tensor of which these positions are left."""
        dense = torch.empty_like(tensor, device="meta", requires_grad=False)
        return cls(tensor.shape, dense.stride(), left)

    @property
    def small(self) -> torch.Size:
        """The shape of what is left."""
        pairs = zip(self.shape, self.left, strict=True)
        return torch.Size(size if left is None else len(left) for size, left in pairs)

    @cached_property
    def small_stride(self) -> tuple[int, ...]:
        """The strides that torch gives a tensor of that shape in the whole one's memory format."""
        for memory in (torch.contiguous_format, _FORMATS.get(len(self.shape))):
            if memory and _strides(self.shape, memory) == self.stride:
                return _strides(self.small, memory)
        order = sorted(range(len(self.shape)), key=lambda dim: self.stride[dim])
        found, step = dict.fromkeys(order, 1), 1
        for dim in order:
            found[dim], step = step, step * max(1, self.small[dim])
        return tuple(found[dim] for dim in range(len(order)))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return what is left of a tensor of that shape."""
        result = tensor
        for dim, left in enumerate(self.left):
            if left is not None:
                result = result.index_select(dim, left.to(tensor.device))
        return _laid_out(result, self.small_stride)

    def put(self, small: Tensor, whole: Tensor | None = None) -> Tensor:
        """Return a copy of ``whole``, of zeros by default, with ``small`` at what is left of it."""
        copy = small.new_empty_strided(self.shape, self.stride)
        copy = copy.zero_() if whole is None else copy.copy_(whole)
        return _put(self.left, 0, small, copy)


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the format in which a tensor lies where it is not torch's usual one."""
    other = _FORMATS.get(tensor.ndim)
    is_other = other and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=other)
    return other if other and is_other else torch.preserve_format


def _strides(shape: torch.Size, memory: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory).stride()


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the same numbers with these strides; what is sparse has none."""
    if tensor.layout != torch.strided or tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _put(left: Sequence[Tensor | None], dim: int, small: Tensor, whole: Tensor) -> Tensor:
    """``whole``, changed in place."""
    while dim < len(left) and left[dim] is None:
        dim += 1
    if dim == len(left):
        return whole.copy_(small)
    positions = left[dim]
    assert positions is not None
    positions = positions.to(whole.device)
    inner = _put(left, dim + 1, small, whole.index_select(dim, positions))
    return whole.index_copy_(dim, positions, inner)
