"""Gradients of what each process computes in full, beside those of the task's loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from l0prune.running.shards import placed_as


def add_gradients(loss: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add the loss' gradients to those that the parameters have.

    It goes around DDP, which would take the parameters for ones that the next batch needs.
    """
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        gradient = placed_as(gradient, parameter)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad.add_(gradient)
