"""Simulated quantisation by channels in float64: torch's operators want scales of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def in_float64(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, or what computes the same where its scales are of float64."""
    return _INSTEAD.get(operator, operator)


def _with_mask(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """``scale·(clamp(q) − zero_point)`` with ``q`` the nearest level, and where it is in range.

    As torch has it, a zero point of whole numbers is added to what was rounded, another before.
    """
    shape = [-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)]
    scale, zero_point = scale.view(shape), zero_point.view(shape)
    steps = x * scale.reciprocal()
    is_whole = not zero_point.is_floating_point()
    level = steps.round() + zero_point if is_whole else (steps + zero_point).round()
    return (level.clamp(low, high) - zero_point) * scale, (level >= low) & (level <= high)


def _learned(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int, *_: Any
) -> Tensor:
    """The zero point is rounded to one of the levels."""
    rounded = zero_point.round().clamp(low, high).long()
    return _with_mask(x, scale, rounded, axis, low, high)[0]


_INSTEAD: dict[Any, Callable[..., Any]] = {
    _ATEN.fake_quantize_per_channel_affine_cachemask.default: _with_mask,
    _ATEN._fake_quantize_learnable_per_channel_affine.default: _learned,
}
