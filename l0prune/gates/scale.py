"""Multiplying a tensor by gates along one dimension, cheaply forwards and backwards."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.autograd import Function


def scale(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
    """``tensor`` times ``values`` along ``dim``, of the tensor's dtype and on its device.

    Differentiable in both, twice if need be. The gradient of ``values`` has their own dtype and is
    summed in it, so that float32 gates of a bfloat16 model learn in float32.

    Shape: tensor any; values ``(tensor.shape[dim],)``.
    """
    if values.device != tensor.device:
        values = values.to(tensor.device)
    result: Tensor = _Scale.apply(tensor, values, dim)
    return result


class _Scale(Function):
    """One node of the graph, and as few passes over a large tensor as there can be."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
        return tensor * _along(tensor, values, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        tensor, values, ctx.dim = inputs
        ctx.save_for_backward(tensor, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tensor, values = ctx.saved_tensors
        for_tensor = grad * _along(tensor, values, ctx.dim) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_tensor, None, None
        for_values = _sum_to(grad.to(values.dtype) * tensor.to(values.dtype), ctx.dim)
        return for_tensor, for_values, None


def _along(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
    """``values`` shaped to broadcast against ``tensor``.

    Where short dimensions follow ``dim`` (a 3×3 kernel), a value repeated over them makes rows
    that the CPU multiplies four times as fast as it broadcasts.
    """
    values = values.to(tensor.dtype)
    after = tensor.shape[dim + 1 :]
    shape = [1] * tensor.dim()
    shape[dim] = tensor.shape[dim]
    if dim == 0 or prod(after) == 1 or not tensor.is_contiguous():
        return values.view(shape)
    shape[dim + 1 :] = after
    return values.unsqueeze(1).expand(-1, prod(after)).reshape(shape)


def _sum_to(tensor: Tensor, dim: int) -> Tensor:
    """Sum over every dim but ``dim``: first over whole rows, which is the fast direction."""
    if dim > 0:
        tensor = tensor.sum(tuple(range(dim)))
    return tensor.flatten(1).sum(1) if tensor.dim() > 1 else tensor
