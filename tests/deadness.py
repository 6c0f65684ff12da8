"""An oracle for the inference: what a closed slot carries must not matter anywhere."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.func import functional_call

import l0prune
from l0prune.capture.capture import capture
from l0prune.infer.build import analyse
from l0prune.infer.nodes import weight_behind
from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switched, without_idle


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Non-trivial weights, biases and statistics everywhere, so that nothing is zero by luck."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            if tensor.ndim > 1 and not tensor.any():  # heads that start from zero
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) / 10
                )
            if tensor.ndim < 2:
                tensor.copy_(noise + 0.5 if "var" in name else noise - 0.3)
    return model


@torch.no_grad()
def relative_effect_of_dead_slots(
    model: nn.Module, args: tuple, seed: int = 0
) -> tuple[Plan, float]:
    """Close half of the gates, those of branches among them, then change every stored value at a
    dead slot: by how much does the output change, relative to its scale? Zero but for rounding if
    the plan, to which a switch is added on each branch, is right. Closed gates alone may make a
    nan, as a row of zeros over its norm does, which the trials of ``gate`` pin: it stays a nan."""
    model = copy.deepcopy(model).double().eval()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    analysis = analyse(capture(model, args))
    captured, names = analysis.captured, {branch.name for branch in analysis.plan.branches}
    plan = switched(analysis.plan, names)
    # weights whose statistics the export takes before the cut: until then no value is dead
    weights = [weight_behind(node) for node in captured.graph.nodes]
    whole = {captured.names.get(node.name) for node in weights if node is not None}
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(plan.size, generator=generator, dtype=torch.float64)
    z *= torch.rand(plan.size, generator=generator) < 0.5
    left = without_idle(plan, z > 0)
    state = {k: v for k, v in model.state_dict().items() if k not in plan.aliases}
    plain = functional_call(model, gated(plan, state, z), args, tie_weights=True)
    noisy = {name: tensor.clone() for name, tensor in state.items()}
    for name, dims in plan.tensors.items():
        if name not in noisy or name in whole or not noisy[name].is_floating_point():
            continue
        for dim, layout in enumerate(dims):
            if axes_of(layout):
                dead = ~plan.mask(layout, left)
                index = dead.nonzero().flatten()
                noise = torch.rand(noisy[name].shape, generator=generator, dtype=torch.float64) + 1
                noisy[name].index_add_(dim, index, noise.index_select(dim, index))
    other = functional_call(model, gated(plan, noisy, z), args, tie_weights=True)
    pairs = zip(_outputs(plain), _outputs(other), strict=True)
    return analysis.plan, max(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))


def _outputs(result: torch.Tensor | tuple) -> list[torch.Tensor]:
    """All tensors of a result."""
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def gated(plan: Plan, state: dict[str, torch.Tensor], z: torch.Tensor) -> dict[str, torch.Tensor]:
    """A copy of the state, which a forward may write to, with every site times its gates."""
    out = {name: tensor.clone() for name, tensor in state.items()}
    for site in plan.sites:
        shape = [1] * out[site.tensor].ndim
        shape[site.dim] = -1
        out[site.tensor] = out[site.tensor] * plan.spread(site.layout, z).view(shape)
    return out


def close_some(model: nn.Module, seed: int = 0, closed: float = 0.5) -> nn.Module:
    """Gates at random: some closed, the open ones fractional."""
    bank = l0prune.gates(model)
    generator = torch.Generator().manual_seed(seed)
    shut = torch.rand(bank.plan.size, generator=generator) < closed
    opened = torch.rand(bank.plan.size, generator=generator) * 4 - 1.5
    with torch.no_grad():
        bank.log_alpha.copy_(torch.where(shut, -5.0, opened))
    return model.eval()
