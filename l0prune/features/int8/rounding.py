"""Rounding of weights to a grid, where features not yet rounded compensate for each rounding.

Wanted are the integers q whose weights W_q = s·q minimise

    E = tr (W_q − W)ᵀ C (W_q − W)

with C the damped moments of the inputs and W the weights that predict y best (``least_squares``).
Features are rounded one after another, and the change of the outputs by a rounding is compensated
by the features that are not yet rounded (OPTQ: Frantar, Ashkboos, Hoefler & Alistarh 2022,
arXiv 2210.17323, algorithm 1): with C⁻¹ = UᵀU, U upper triangular,

    W_j ← W_j − U_ij / U_ii · (W_i − s·q_i),  j > i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from l0prune.selection.least_squares import damping

_STRENGTH = 1e-2
_BLOCK = 128  # features whose errors are passed on to the others at once


def nearest(weight: Tensor, steps: Tensor, largest: int) -> Tensor:
    """Return the nearest integers, by magnitude no larger than ``largest``."""
    return (weight / steps).round().clamp(-largest, largest)


def rounded(weight: Tensor, gram: Tensor, steps: Tensor, largest: int) -> Tensor:
    """Return the integers q of weights on a grid, rounded by OPTQ.

    No output has a larger E than with the nearest integers.

    Args:
        weight: W, shape (groups, features, outputs).
        gram: moments of the inputs, shape (groups, features, features).
        steps: s, shape as weight.
        largest: the largest integer, by magnitude.

    Shape: as weight; all float64.
    """
    damped = gram + torch.diag_embed(damping(gram, _STRENGTH))
    order = damped.diagonal(dim1=1, dim2=2).argsort(1, descending=True)  # the costly ones first
    damped = damped.gather(1, order[:, :, None].expand_as(damped))
    damped = damped.gather(2, order[:, None].expand_as(damped))
    order = order[:, :, None].expand_as(weight)
    given, steps = weight.gather(1, order), steps.gather(1, order)
    made = nearest(given, steps, largest)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if not failed.any():
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    if not failed.any():
        turned = _in_turns(given, steps, upper, largest)

        def error(whole: Tensor) -> Tensor:
            left: Tensor = factor.mT @ (whole * steps - given)
            return left.square().sum(1, keepdim=True)

        made = torch.where(error(turned) < error(made), turned, made)
    return torch.zeros_like(weight).scatter(1, order, made)


def _in_turns(weight: Tensor, steps: Tensor, upper: Tensor, largest: int) -> Tensor:
    """Round features one after another; see the module's docstring."""
    left, made = weight.clone(), torch.zeros_like(weight)
    features = weight.shape[1]
    for start in range(0, features, _BLOCK):
        end = min(start + _BLOCK, features)
        errors = torch.zeros_like(left[:, start:end])
        for i in range(start, end):
            made[:, i] = nearest(left[:, i], steps[:, i], largest)
            error = (left[:, i] - made[:, i] * steps[:, i]) / upper[:, i, i, None]
            left[:, i:end] -= upper[:, i, i:end, None] * error[:, None]
            errors[:, i - start] = error
        left[:, end:] -= upper[:, start:end, end:].mT @ errors
    return made
