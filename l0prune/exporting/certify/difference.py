"""Difference between two outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from l0prune.capture.compat import pytree

_NUMBERS = (bool, int, str)  # values beside tensors in an output, compared exactly
_FEW = 16  # values, at most, that stand for what is masked
_LARGE = 1e4  # size of numbers that may stand for what is masked: -1e4, -65504, -1e9, …


def difference(expected: Any, found: Any) -> float:
    """Largest difference over all output tensors, each relative to its expected largest value.

    Infinite if shapes, or values that are no tensors, differ.
    """
    return largest(differences(expected, found))


def differences(expected: Any, found: Any, scales: Sequence[float] = ()) -> list[float]:
    """Return each output tensor's largest difference, relative to its expected largest value.

    All are infinite if shapes, or values that are no tensors, differ.

    If ``scales`` (``common_scales``) are given, differences are relative to these instead.
    """
    firsts, seconds = comparable(expected), comparable(found)
    if len(firsts) != len(seconds) or any(
        a != b if isinstance(a, _NUMBERS) or isinstance(b, _NUMBERS) else a.shape != b.shape
        for a, b in zip(firsts, seconds, strict=True)
    ):
        return [float("inf")] * max(sum(isinstance(each, Tensor) for each in firsts), 1)
    pairs = [each for each in zip(firsts, seconds, strict=True) if isinstance(each[0], Tensor)]
    known = scales or [_scale([a]) for a, _ in pairs]
    return [_gap(a, b, scale) for (a, b), scale in zip(pairs, known, strict=True)]


def common_scales(outputs: Sequence[Any]) -> tuple[float, ...]:
    """Return the largest finite absolute value of each output tensor over several outputs.

    A tensor that is tiny by chance on one input, such as a sigmoid's output near 0, is thus
    compared on the scale of the others. A large number that each example has, such as the -1e9 of
    what is masked, is no scale of the others. Empty if the outputs' numbers of tensors differ.
    """
    tensors = [[leaf for leaf in comparable(o) if isinstance(leaf, Tensor)] for o in outputs]
    if len({len(each) for each in tensors}) != 1:
        return ()
    return tuple(map(_scale, zip(*tensors, strict=True)))


def largest(errors: Sequence[float]) -> float:
    """Return the largest of the errors; nan if one is nan."""
    return max(errors, default=0.0) if not any(e != e for e in errors) else float("nan")


def _gap(a: Tensor, b: Tensor, scale: float) -> float:
    if not a.numel():
        return 0.0
    a, b = _wide(a), _wide(b).to(a.device)
    gap = torch.where(a == b, 0, (a - b).abs())  # equal infinities are no difference
    return float(gap.max()) / max(scale, torch.finfo(torch.float32).tiny)


def _scale(alike: Sequence[Tensor]) -> float:
    """Return the largest finite absolute value but for constants; of these if there are no others.

    ``alike`` are one tensor of several outputs.
    """
    constants = _constants(alike)
    others = max(_largest_of(each, constants) for each in alike)
    return others or max(_largest_of(each, frozenset()) for each in alike)


def _largest_of(tensor: Tensor, without: Set[float]) -> float:
    if not tensor.numel():
        return 0.0
    wide = _wide(tensor)
    is_left_out = wide.isinf()
    for value in without:
        is_left_out |= wide == value
    return float(torch.where(is_left_out, 0, wide).abs().max())


def _constants(alike: Sequence[Tensor]) -> Set[float]:
    """Return the large numbers that each of several examples of one dtype has, to the bit."""
    by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
    for each in alike:
        if each.is_floating_point() and each.numel():
            by_dtype[each.dtype] += each if each.dim() > 1 else [each]
    found: Set[float] = frozenset()
    for dtype, rows in by_dtype.items():
        limits = torch.finfo(dtype)
        large = _large_in(rows[0])
        for row in rows[1:]:
            large = large & _large_in(row) if large else large
        if len(rows) == 1:  # any other may be a result
            large = large & {limits.min, limits.max}
        found = found | large
    return found


def _large_in(values: Tensor) -> Set[float]:
    """Return a few large finite numbers; none if there are many, which are results."""
    found = values[values.isfinite() & (values.abs() >= _LARGE)].unique()
    return frozenset(found.tolist() if len(found) <= _FEW else ())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def comparable(output: Any) -> list[Any]:
    """Return the comparable values of an output: tensors, integers, booleans and strings."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (Tensor, *_NUMBERS))]
