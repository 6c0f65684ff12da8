"""Layers that torch does not have: what is left of one of its own when some inputs are gone.

Plain torch and nothing else: this file can be copied beside the weights of a cut model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CutLayerNorm(nn.LayerNorm):
    """LayerNorm some of whose inputs are gone; all of them were zero.

    Attributes:
        normalized_shape: of what is left.
        inputs: how many values were averaged over.
        dim: the first of the dims that are averaged over, counted from the last one; 1 for
            channels that come before positions.
    """

    inputs: int
    dim: int

    def forward(self, input: Tensor) -> Tensor:
        """The norm of what is left, by the averages over all. Shape: as the input."""
        dims = [1] if self.dim == 1 else list(range(self.dim, 0))
        return _normalised(input, dims, self.inputs, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What it was, too."""
        return f"{super().extra_repr()}, inputs={self.inputs}, dim={self.dim}"


class CutGroupNorm(nn.GroupNorm):
    """GroupNorm with one group, some of whose channels are gone; all of them were zero.

    Attributes:
        num_channels: how many are left.
        inputs: how many there were.
    """

    inputs: int

    def forward(self, input: Tensor) -> Tensor:
        """The norm of what is left, by the averages over all. Shape: as the input."""
        values = self.inputs * input[0, 0].numel()
        dims = list(range(1, input.ndim))
        return _normalised(input, dims, values, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What it was, too."""
        return f"{super().extra_repr()}, inputs={self.inputs}"


class PickedLinear(nn.Linear):
    """A Linear layer that reads some of its inputs.

    Attributes:
        in_features: how many it reads.
        kept: which ones, int64, shape ``(in_features,)``.
    """

    kept: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Shape: ``(…, all inputs)`` to ``(…, out_features)``."""
        return F.linear(input.index_select(-1, self.kept), self.weight, self.bias)


LAYERS = {each.__name__: each for each in (CutLayerNorm, CutGroupNorm, PickedLinear)}


def _normalised(
    x: Tensor,
    dims: list[int],
    before: int,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """``(x − mean) / √(variance + ε)`` of ``before`` values of which those not in x were zero.

    With a share s of them left, of mean m and variance v, ``mean = s·m`` and
    ``variance = s·(v + (1 − s)·m²)``. In half precision the statistics are taken in float32.
    """
    whole = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    left = 1
    for dim in dims:
        left *= x.shape[dim]
    share = left / before
    variance, mean = torch.var_mean(whole, dims, correction=0, keepdim=True)
    variance = share * (variance + (1 - share) * mean.square())
    result = (whole - share * mean) * torch.rsqrt(variance + eps)
    after = 0 if dims[0] < 0 else x.ndim - 2  # dims behind the channels
    if weight is not None:
        result = result * weight.view(*weight.shape, *[1] * after)
    if bias is not None:
        result = result + bias.view(*bias.shape, *[1] * after)
    return result.to(x.dtype)
