"""Folding gates into weights and slicing every stored tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from l0prune.exporting.slicing.chosen import Chosen
from l0prune.exporting.slicing.standardised_weights import with_statistics_taken
from l0prune.infer.parts import Part, Parts
from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Plan

_TINY = torch.finfo(torch.float32).tiny  # the smallest normal number of what will be written


def cut_tensors(plain: nn.Module, parts: Parts, chosen: Mapping[str, Chosen]) -> dict[str, Tensor]:
    """Every stored tensor that the parts use, folded and cut, in float64, by name."""
    tensors: dict[str, Tensor] = {}
    for part in parts.found:
        tensors |= _of_part(plain, part, chosen[part.path])
    return tensors


def _of_part(plain: nn.Module, part: Part, chosen: Chosen) -> dict[str, Tensor]:
    plan = part.analysis.plan
    captured = part.analysis.captured
    stored = {captured.stored(name): value for name, value in captured.program.constants.items()}
    stored |= {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    tensors = {n: t.detach() for n, t in stored.items() if n in plan.tensors}
    folded = fold(plan, doubled(tensors), chosen.z)
    return cut(plan, with_statistics_taken(part.analysis, folded, chosen.kept), chosen.kept)


def cut_state(plain: nn.Module, plan: Plan, exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The cut tensors under every key of the model's own state_dict, in their own dtypes."""
    state = {}
    for key, old in plain.state_dict().items():
        name = plan.aliases.get(key, key)
        state[key] = exact[name].to(old.dtype) if name in exact else old
    return state


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
