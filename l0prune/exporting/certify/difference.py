"""How far two outputs are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_NUMBERS = (bool, int, str)  # what an output may hold beside tensors, and must be the same


def difference(expected: Any, found: Any) -> float:
    """Largest difference over all output tensors, each relative to its own largest value.

    Infinite where shapes, or numbers that are no tensors, are not the same.
    """
    return largest(differences(expected, found))


def differences(expected: Any, found: Any) -> list[float]:
    """The largest difference of each output tensor, relative to its own largest value.

    All are infinite where shapes, or numbers that are no tensors, are not the same.
    """
    firsts, seconds = comparable(expected), comparable(found)
    if len(firsts) != len(seconds) or any(
        a != b if isinstance(a, _NUMBERS) or isinstance(b, _NUMBERS) else a.shape != b.shape
        for a, b in zip(firsts, seconds, strict=True)
    ):
        return [float("inf")] * max(sum(isinstance(each, Tensor) for each in firsts), 1)
    pairs = zip(firsts, seconds, strict=True)
    return [_gap(a, b) for a, b in pairs if isinstance(a, Tensor)]


def largest(errors: Sequence[float]) -> float:
    """The largest of these; nan where one is."""
    return max(errors, default=0.0) if not any(e != e for e in errors) else float("nan")


def _gap(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    gap = torch.where(a == b, 0, (a - b).abs())  # equal infinities are no difference
    scale = torch.where(a.isinf(), 0, a).abs().max()
    return float(gap.max() / scale.clamp(min=torch.finfo(torch.float32).tiny))


def comparable(output: Any) -> list[Any]:
    """What can be compared of an output: its tensors and numbers."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (Tensor, *_NUMBERS))]
