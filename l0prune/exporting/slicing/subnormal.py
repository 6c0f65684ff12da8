"""Weights too small for a normal number: they slow many CPUs down manyfold.

A subnormal operand may cost a CPU more than a hundred cycles instead of one. Training leaves many:
what no gradient reaches any more decays by a constant factor a step. Zero in their place changes a
sum by less than 1.2e-38 times the other operand, which is far within rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).smallest_normal
_SMALLEST_OF_DOUBLE = torch.finfo(torch.float64).smallest_normal


def flush(tensor: Tensor, dtype: torch.dtype) -> None:
    """Let numbers be zero that would be subnormal in the end, in place.

    The bound is that of float32 also for bfloat16, which has the same, and float16, with which CPUs
    compute as with float32: its own subnormal numbers are normal there.

    Args:
        tensor: of float64 or complex128; one of another dtype stays as it is.
        dtype: what it will be rounded to.
    """
    if tensor.is_complex():
        flush(torch.view_as_real(tensor), dtype.to_real())
    elif tensor.is_floating_point():
        bound = _SMALLEST_OF_DOUBLE if dtype == torch.float64 else SMALLEST
        tensor.masked_fill_(tensor.abs() < bound, 0)
