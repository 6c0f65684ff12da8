"""Multiplying a tensor by gates along one dimension, cheaply forwards and backwards."""

from __future__ import annotations

from math import prod

from torch import Tensor


def scale(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
    """``tensor`` times ``values`` along ``dim``; dtype and device are the tensor's.

    Where the values are the more precise of the two (float32 gates of a bfloat16 model), the
    product and its gradients are computed in their dtype.

    Shape: tensor any; values ``(tensor.shape[dim],)``.
    """
    if not tensor.numel():  # of a branch that is gone: nothing is left to multiply
        return tensor
    if values.device != tensor.device:
        values = values.to(tensor.device)
    product = tensor * _along(tensor, values, dim)
    return product if product.dtype == tensor.dtype else product.to(tensor.dtype)


def _along(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
    """``values`` shaped to broadcast against ``tensor``.

    Where short dimensions follow ``dim`` (a 3×3 kernel), repeating each value over them makes
    rows, which the CPU multiplies, and sums in backward, four times as fast as it broadcasts.

    Nothing here is told a size: the code around it may be one whose sizes are given to it, call
    by call (see ``GivenSizes``).
    """
    after = tensor.shape[dim + 1 :]
    if not after:
        return values
    for _ in range(dim):
        values = values.unsqueeze(0)
    for _ in after:
        values = values.unsqueeze(-1)
    if dim == 0 or prod(after) == 1 or not tensor.is_contiguous():
        return values
    one = tensor.detach()
    for before in range(dim):
        one = one.narrow(before, 0, 1)
    return values.expand_as(one).contiguous()
