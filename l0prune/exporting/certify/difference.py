"""Difference between two outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from l0prune.capture.compat import pytree

_NUMBERS = (bool, int, str)  # what an output may hold beside tensors, and must be the same


def difference(expected: Any, found: Any) -> float:
    """Largest difference over all output tensors, each relative to its own largest value.

    Infinite where shapes, or numbers that are no tensors, are not the same.
    """
    return largest(differences(expected, found))


def differences(expected: Any, found: Any, scales: Sequence[float] = ()) -> list[float]:
    """The largest difference of each output tensor, relative to its own largest value.

    All are infinite where shapes, or numbers that are no tensors, are not the same.

    Each is related to ``scales`` (``common_scales``) instead, where these are given.
    """
    firsts, seconds = comparable(expected), comparable(found)
    if len(firsts) != len(seconds) or any(
        a != b if isinstance(a, _NUMBERS) or isinstance(b, _NUMBERS) else a.shape != b.shape
        for a, b in zip(firsts, seconds, strict=True)
    ):
        return [float("inf")] * max(sum(isinstance(each, Tensor) for each in firsts), 1)
    pairs = [each for each in zip(firsts, seconds, strict=True) if isinstance(each[0], Tensor)]
    known = scales or [_scale(a) for a, _ in pairs]
    return [_gap(a, b, scale) for (a, b), scale in zip(pairs, known, strict=True)]


def common_scales(outputs: Sequence[Any]) -> tuple[float, ...]:
    """The largest finite value of each tensor in several outputs of one model, over all of them.

    What is tiny by chance on one input, an answer near none of a sigmoid, is compared by what the
    output is like on the others. Empty where they do not hold equally many tensors.
    """
    tensors = [[leaf for leaf in comparable(o) if isinstance(leaf, Tensor)] for o in outputs]
    if len({len(each) for each in tensors}) != 1:
        return ()
    return tuple(max(map(_scale, alike)) for alike in zip(*tensors, strict=True))


def largest(errors: Sequence[float]) -> float:
    """The largest of these; nan where one is."""
    return max(errors, default=0.0) if not any(e != e for e in errors) else float("nan")


def _gap(a: Tensor, b: Tensor, scale: float) -> float:
    if not a.numel():
        return 0.0
    a, b = _wide(a), _wide(b).to(a.device)
    gap = torch.where(a == b, 0, (a - b).abs())  # equal infinities are no difference
    return float(gap.max()) / max(scale, torch.finfo(torch.float32).tiny)


def _scale(tensor: Tensor) -> float:
    wide = _wide(tensor)
    return float(torch.where(wide.isinf(), 0, wide).abs().max()) if tensor.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def comparable(output: Any) -> list[Any]:
    """Comparable values of an output: its tensors and numbers."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (Tensor, *_NUMBERS))]
