"""Folding gates into weights and slicing every stored tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Plan

_TINY = torch.finfo(torch.float32).tiny  # the smallest normal number of what will be written


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with floating-point ones in float64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


@torch.no_grad()
def fold(plan: Plan, tensors: Mapping[str, Tensor], z: Tensor) -> dict[str, Tensor]:
    """Every tensor of the plan, those at sites multiplied by their gates.

    Products too small for a normal number become zero: they slow CPUs down manyfold.
    """
    folded = dict(tensors)
    for site in plan.sites:
        tensor = folded[site.tensor]
        shape = [1] * tensor.ndim
        shape[site.dim] = -1
        scale = plan.spread(site.layout, z).to(tensor.dtype).view(shape)
        product = tensor * scale
        folded[site.tensor] = torch.where(product.abs() < _TINY, 0, product)
    return folded


@torch.no_grad()
def cut(plan: Plan, tensors: Mapping[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """Every tensor with the slots that are not kept sliced out of each of its dims."""
    out = {}
    for name, tensor in tensors.items():
        for dim, layout in enumerate(plan.tensors.get(name, ())):
            if axes_of(layout):
                index = plan.mask(layout, kept).nonzero().flatten()
                tensor = tensor.index_select(dim, index)
        out[name] = tensor.clone()
    return out
