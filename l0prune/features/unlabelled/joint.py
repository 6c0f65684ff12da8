"""Least squares for one weight that several products read, each as another matrix.

A tied decoder reads the transpose of its encoder's weight. With index matrices m_i, which say what
element of the weight is where in matrix i, the weight w minimises

    Σ_i |y_i − x_i w[m_i] − b_i|² / var(y_i) + λ (w − w₀)ᵀ D (w − w₀),

D being the diagonal of the first term's Hessian. The normal equations are solved by conjugate
gradients, since the Hessian has the square of the number of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from l0prune.selection.least_squares import DAMPING, NOISE, Moments, left_of

_STEPS, _ENOUGH = 100, 1e-6  # most steps of a solution, and the relative residual that ends it


@dataclass(frozen=True, slots=True)
class Part:
    """Products that read the weight as one matrix.

    Attributes:
        seen, held: moments that the weight is fitted to, and those that choose λ.
        index: m, the elements of the weight; shape (groups, features, outputs).
        has_bias: a constant of its own is added to the product.
    """

    seen: Moments
    held: Moments
    index: Tensor
    has_bias: bool


@dataclass(frozen=True, slots=True)
class JointSolution:
    """A weight that several products read.

    Attributes:
        flat: its elements.
        biases: the constant of each part, shape (groups, outputs).
        error: the largest error of a part; see ``Solution``.
    """

    flat: Tensor
    biases: list[Tensor]
    error: float


def solve_together(parts: Sequence[Part], prior: Tensor) -> JointSolution:
    """Return the weight that fits all parts best.

    Args:
        prior: w₀, all elements of the weight; float64.
    """
    seen = _Quadratic([(part, part.seen) for part in parts], prior)
    both = _Quadratic([(part, part.seen + part.held) for part in parts], prior)
    best, strength = _errors(parts, prior), None
    for tried in DAMPING:
        errors = _errors(parts, seen.least(tried))
        if sum(errors) < sum(best):
            best, strength = errors, tried
    flat = prior if strength is None else both.least(strength)
    biases = [
        total.bias(flat[part.index]) if part.has_bias else torch.zeros_like(total.y)
        for part, total in both.parts
    ]
    return JointSolution(flat, biases, max(best))


def _errors(parts: Sequence[Part], flat: Tensor) -> list[float]:
    """Return the part of the held-out outputs' variance that each product leaves as error."""
    found = []
    for part in parts:
        about = _about(part, part.held)
        left = left_of(about, flat[part.index]).clamp(min=0).sum()
        found.append(float(left / about[2].sum().clamp(min=1e-30)))
    return found


def _about(part: Part, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    xx, xy, yy = moments.about(mean=part.has_bias)
    return xx.double(), xy.double(), yy.double()


class _Quadratic:
    """The sum of the parts' errors as a function of the weight."""

    def __init__(self, parts: Sequence[tuple[Part, Moments]], prior: Tensor) -> None:
        self.parts, self.prior = parts, prior
        self._terms = list[tuple[Tensor, Tensor]]()
        self._slope, self._diagonal = torch.zeros_like(prior), torch.zeros_like(prior)
        for part, moments in parts:
            c_xx, c_xy, c_yy = _about(part, moments)
            scale = c_yy.sum().clamp(min=1e-30)
            self._terms.append((part.index, c_xx / scale))
            self._add(self._slope, part.index, c_xy / scale)
            diagonal = c_xx.diagonal(dim1=1, dim2=2)[:, :, None] / scale
            self._add(self._diagonal, part.index, diagonal.expand(part.index.shape))

    def _add(self, flat: Tensor, index: Tensor, values: Tensor) -> None:
        flat.index_add_(0, index.flatten(), values.flatten())

    def _curvature(self, flat: Tensor) -> Tensor:
        result = torch.zeros_like(flat)
        for index, c_xx in self._terms:
            self._add(result, index, c_xx @ flat[index])
        return result

    def least(self, strength: float) -> Tensor:
        """Return the weight at the minimum, damped by λ towards the prior."""
        # Elements that no input reaches stay.
        damp = strength * torch.where(self._diagonal > 0, self._diagonal, 1.0)
        damp = damp + NOISE * self._diagonal.max()
        residual = self._slope - self._curvature(self.prior)
        return self.prior + _conjugate_gradients(
            lambda step: self._curvature(step) + damp * step, residual, self._diagonal + damp
        )


def _conjugate_gradients(
    matrix: Callable[[Tensor], Tensor], wanted: Tensor, diagonal: Tensor
) -> Tensor:
    """Return x with ``matrix(x) = wanted``, preconditioned by the diagonal."""
    x, left = torch.zeros_like(wanted), wanted.clone()
    direction = near = left / diagonal
    fall = float(left @ near)
    least = _ENOUGH**2 * fall
    for _ in range(_STEPS):
        if fall <= least:
            break
        image = matrix(direction)
        length = fall / float(direction @ image)
        x, left = x + length * direction, left - length * image
        near = left / diagonal
        fall, before = float(left @ near), fall
        direction = near + fall / before * direction
    return x
