"""Least squares from streamed moments: the weights that predict y from x best.

With centred moments W = C_xx⁻¹ C_xy and b = μ_y − μ_x W; without a bias the same of moments about
zero. Both are regularised towards existing weights W₀:

    W_λ = (C_xx + λ·D + ν)⁻¹ (C_xy + (λ·D + ν)·W₀),  D the diagonal of C_xx,

with ν of 1e-8 of the largest variance, so that inputs that are rounding alone keep their weights.
The strength (λ from 1e-5 to 1, or W₀ itself) is chosen for each output by its error on held-out
moments, so that few samples do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_LARGE, _FEWER = 1500, (1e-4, 1e-2, 1.0)  # from so many features each strength takes seconds
_WIDE = 5120  # features above which products are in single precision
# Of the largest variance of an input. Its root is what results of runtimes may differ by
# (``certificate.LARGEST``), on which no weight is to be built.
NOISE = 1e-8


def precision(features: int) -> torch.dtype:
    """Return the dtype in which products of so many features are summed and solved.

    Single precision bounds the memory of wide layers; with centred values and the strengths that
    are tried for them it suffices.
    """
    return torch.float64 if features <= _WIDE else torch.float32


class Moments:
    """Means of x and y over samples, and sums of products of what differs from the means.

    Means are float64, products as ``precision`` says.

    Shape: x (groups, rows, features), y (groups, rows, outputs).

    Args:
        is_basis: y is the input of a further weight; see ``through``.
    """

    def __init__(self, *, is_basis: bool = False) -> None:
        self.count = 0
        self._is_basis = is_basis
        self.x = self.y = self.xx = self.xy = self.yy = torch.zeros(())

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count more samples.

        Products are of centred values, so that single precision suffices.
        """
        more = Moments()
        more.count = x.shape[1]
        more.x, more.y = (each.mean(1, dtype=torch.float64) for each in (x, y))
        x, y = x.float() - more.x.float()[:, None], y.float() - more.y.float()[:, None]
        dtype = precision(x.shape[2])
        more.xx, more.xy = (x.mT @ x).to(dtype), (x.mT @ y).to(dtype)
        more.yy = (y.mT @ y if self._is_basis else y.square().sum(1)).to(dtype)
        self._merge(more)

    def _merge(self, more: Moments) -> None:
        """Count the samples of other moments, too; their products are overwritten."""
        if not self.count:
            self.count = more.count
            for name in ("x", "y", "xx", "xy", "yy"):
                setattr(self, name, getattr(more, name))
            return
        if not more.count:
            return
        both = self.count + more.count
        apart_x, apart_y = more.x - self.x, more.y - self.y
        weighted = self.count * more.count / both * apart_x
        _add_outer(self.xx.add_(more.xx), weighted, apart_x)
        _add_outer(self.xy.add_(more.xy), weighted, apart_y)
        if self.yy.dim() == 3:
            _add_outer(self.yy.add_(more.yy), self.count * more.count / both * apart_y, apart_y)
        else:
            self.yy.add_(more.yy).add_(self.count * more.count / both * apart_y.square())
        self.x = self.x + more.count / both * apart_x
        self.y = self.y + more.count / both * apart_y
        self.count = both

    def through(self, weight: Tensor, bias: Tensor | None) -> Moments:
        """Return the moments of x and ``y @ weight + bias`` from these of x and y.

        Shape: weight (groups, outputs, further), bias (groups, further).
        """
        result, to = Moments(), weight.to(self.xy)
        result.count, result.x, result.xx = self.count, self.x, self.xx
        result.xy, result.yy = self.xy @ to, ((self.yy @ to) * to).sum(1)
        result.y = (self.y[:, None] @ weight)[:, 0] + (0 if bias is None else bias)
        return result

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the samples of both."""
        both = Moments()
        for each in (self, other):
            part = Moments()
            part.count, part.x, part.y = each.count, each.x, each.y
            part.xx, part.xy, part.yy = (p.clone() for p in (each.xx, each.xy, each.yy))
            both._merge(part)
        return both

    def bias(self, weight: Tensor) -> Tensor:
        """Return the best bias beside a weight, μ_y − μ_x W."""
        return self.y - (self.x[:, None] @ weight.to(self.x))[:, 0]

    def about(self, *, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return C_xx, C_xy and the diagonal of C_yy, about the mean or about zero."""
        xx, xy, yy = (each / self.count for each in (self.xx, self.xy, self.yy))
        if not mean:
            _add_outer(xx, self.x, self.x)
            _add_outer(xy, self.x, self.y)
            if yy.dim() < 3:
                yy += self.y.square()
        return xx, xy, yy


def _add_outer(to: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the outer products of vectors, group by group, to matrices."""
    to.baddbmm_(left[:, :, None].to(to), right[:, None].to(to))


def left_of(about: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> Tensor:
    """Return the mean squared residual of each output under a weight, with the best bias.

    Args:
        about: what ``Moments.about`` returns; about zero there is no bias.
    """
    c_xx, c_xy, c_yy = about
    return c_yy + ((c_xx @ weight) * weight).sum(1) - 2 * (weight * c_xy).sum(1)


def strengths(features: int) -> tuple[float, ...]:
    """Return the strengths λ of damping that are tried for so many features."""
    return DAMPING if features < _LARGE else _FEWER


def damping(c_xx: Tensor, strength: float) -> Tensor:
    """Return the diagonal of λ·D + ν, with λ for inputs that are always zero."""
    diagonal = c_xx.diagonal(dim1=1, dim2=2).clamp(min=0)
    return strength * torch.where(diagonal > 0, diagonal, 1.0) + noise_of(diagonal)


def noise_of(variances: Tensor) -> Tensor:
    """Return ν of each group, shape (groups, 1), for variances of shape (groups, features)."""
    return NOISE * variances.amax(1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Solution:
    """Weights and bias that predict y.

    Attributes:
        weight: shape (groups, features, outputs).
        bias: shape (groups, outputs); zeros where none is allowed.
        error: mean squared residual of y on the held-out samples, over its variance there (without
            a bias, over its mean square); all outputs together.
    """

    weight: Tensor
    bias: Tensor
    error: float


def solve(
    seen: Moments,
    held: Moments,
    prior: Tensor,
    *,
    has_bias: bool,
) -> Solution:
    """Return the weights that predict y best.

    Args:
        held: held-out moments, which choose the strength of the regularisation towards ``prior``.
        prior: W₀, shape (groups, features, outputs).

    The result is in the dtype of the products.
    """
    prior = prior.to(seen.xx)
    about = held.about(mean=has_bias)
    scale = about[2].clamp(min=1e-30)

    def error(weight: Tensor) -> Tensor:
        return left_of(about, weight)

    tried: list[tuple[float | None, Tensor]] = [(None, error(prior))]
    for strength in strengths(prior.shape[1]):
        weight = _ridge(*seen.about(mean=has_bias)[:2], prior, strength)
        if weight is not None:
            tried.append((strength, error(weight)))
    best = torch.stack([each for _, each in tried]).argmin(0)  # groups, outputs
    about = (torch.zeros(()),) * 3
    both = seen + held
    result = prior.clone()
    left = tried[0][1].clone()
    for number, (damped, errors) in enumerate(tried):
        chosen = best == number
        if damped is not None and bool(chosen.any()):
            weight = _ridge(*both.about(mean=has_bias)[:2], prior, damped)
            if weight is not None:
                result = torch.where(chosen[:, None], weight, result)
                left = torch.where(chosen, errors, left)
    bias = both.bias(result) if has_bias else torch.zeros_like(both.y)
    return Solution(result, bias, float(left.clamp(min=0).sum() / scale.sum()))


def _ridge(c_xx: Tensor, c_xy: Tensor, prior: Tensor, strength: float) -> Tensor | None:
    """W_λ; None where the damped matrix is singular. Both moments are overwritten."""
    damp = damping(c_xx, strength)
    c_xx.diagonal(dim1=1, dim2=2).add_(damp)
    factor, info = torch.linalg.cholesky_ex(c_xx)
    if bool((info != 0).any()):
        return None
    weight = torch.cholesky_solve(c_xy.addcmul_(damp[:, :, None], prior), factor)
    return weight if bool(weight.isfinite().all()) else None
