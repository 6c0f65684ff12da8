"""Where a tensor is cut in place: what is left of it, and how it becomes whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a tensor of the model was cut.

    Attributes:
        shape: that it had.
        left: for each dim the positions that are left, or None for all.
    """

    shape: torch.Size
    left: tuple[Tensor | None, ...]

    @property
    def small(self) -> torch.Size:
        """The shape of what is left."""
        pairs = zip(self.shape, self.left, strict=True)
        return torch.Size(size if left is None else len(left) for size, left in pairs)

    def cut(self, tensor: Tensor) -> Tensor:
        """What is left of a tensor of that shape, in the same order of memory."""
        result = tensor
        for dim, left in enumerate(self.left):
            if left is not None:
                result = result.index_select(dim, left.to(tensor.device))
        if tensor.dim() == 4 and not tensor.is_contiguous():
            return result.contiguous(memory_format=torch.channels_last)
        return result

    def put(self, small: Tensor, whole: Tensor) -> Tensor:
        """A copy of ``whole`` with ``small`` at what is left of it."""
        return _put(self.left, 0, small, whole.clone())


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
