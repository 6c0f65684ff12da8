"""Test, before any gate is trained, whether an export will keep the model's class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied_around
from l0prune.capture.example_inputs import examples_in, holds_objects
from l0prune.capture.sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.exporting.certify.verify import answers_to_all
from l0prune.exporting.network import copies_of
from l0prune.exporting.own_class.choice import Reference, choose, own_class
from l0prune.exporting.slice import chosen_on
from l0prune.exporting.slicing.tensors import cut_by_plan
from l0prune.gating.attaching import attach
from l0prune.gating.bank import Gates
from l0prune.gating.gate import kept_example
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.plan.plan import Plan
from l0prune.progress.stages import stage
from l0prune.running.device import device_of

# Models with more parameters are not tried: that would take minutes.
_LARGEST = 500_000_000
_NOISE = 0.05


@stage("checking whether a smaller model keeps its class")
def why_no_class(
    model: nn.Module, plan: Plan, example: Inputs, free: FreeSizes = ALL_FIXED
) -> str | None:
    """Return the reason if an export will be a captured graph instead of the model's own class.

    Half of all slots are cut at random, and the class is tried as in an export, on one input of
    another batch size than the example's, in eval mode. Faults that only another choice of slots
    shows are missed.

    Returns:
        The reason; empty if the class is kept. None if this was not tried: on the meta device, with
        an object among the inputs, for a model captured in parts, of several dtypes, of more than
        500 million parameters, or that does not run as a copy or in float64.
    """
    tensors = [*model.parameters(), *model.buffers()]
    is_large = sum(p.numel() for p in model.parameters()) > _LARGEST
    if plan.in_parts or not plan.axes or is_large or any(t.is_meta for t in tensors):
        return None
    if holds_objects(example):  # tensors in objects are cut with a capture only
        return None
    try:
        return _tried(model, plan, example, free)
    except Exception:  # an export would report it; a survey need not
        return None


def _tried(model: nn.Module, plan: Plan, example: Inputs, free: FreeSizes) -> str | None:
    network = copies_of(_half_closed(model, plan, example, free))
    chosen = chosen_on(plan, network)
    tensors = cut_by_plan(network.plain, chosen)
    batch = 3 if examples_in(network.example) == 2 else 2
    answers = answers_to_all(network, (batch,))
    if tensors is None or not answers or not network.dtypes.are_one:
        return None
    own = own_class(network.plain, chosen, tensors)
    reference = Reference("", network.gated, answers, is_trained=False)
    return choose(own, [reference]).comparisons[""].reason


@torch.no_grad()
def _half_closed(model: nn.Module, plan: Plan, example: Inputs, free: FreeSizes) -> nn.Module:
    """Return a copy of the model with gates, a random half of them closed.

    Its weights get noise, since weights of zero would hide faults.
    """
    generator = torch.Generator().manual_seed(0)
    closed = torch.rand(plan.size, generator=generator) < 0.5
    for axis in plan.axes:
        closed[axis.start] = False
    log_alpha = torch.where(closed, -5.0, 5.0)
    result = copied_around(model)
    for parameter in result.parameters():
        if parameter.is_floating_point():
            parameter.data = _with_noise(parameter.data, generator)
    log_alpha = log_alpha.to(device_of(result))
    attach(result, Gates(plan, HardConcrete(), log_alpha, kept_example(example), free))
    return result


def _with_noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    scale = tensor.float().square().mean().sqrt() or 1.0
    noise = torch.randn(tensor.shape, generator=generator) * _NOISE * float(scale)
    return tensor + noise.to(tensor)
