"""Small networks with plans written by hand, for tests that need gates but no survey."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from l0prune.gating.attaching import attach
from l0prune.gating.bank import Gates
from l0prune.gating.kinds.base import Gate
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.plan.layout import Const, Gated, Prod, Slots
from l0prune.plan.plan import Axis, Plan, Site


def mlp() -> nn.Sequential:
    """12-8-6-3; the input features are gated, too. Tanh, so that gradients reach every gate."""
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def mlp_plan() -> Plan:
    inputs, first, second = Slots(0, 0, 12), Slots(1, 0, 8), Slots(2, 0, 6)
    return Plan(
        axes=(
            Axis("input", "input", 12, 0, 8),
            Axis("0", "neuron", 8, 12, 6),
            Axis("2", "neuron", 6, 20, 3),
        ),
        pins=(),
        tensors={
            "0.weight": (first, inputs),
            "0.bias": (first,),
            "2.weight": (second, first),
            "2.bias": (second,),
            "4.weight": (Const(3), second),
            "4.bias": (Const(3),),
        },
        sites=(
            Site("0.weight", 1, Gated(Const(12), inputs), "read"),
            Site("2.weight", 1, first, "read"),
            Site("4.weight", 1, second, "read"),
        ),
        costs=(),
    )


def lenet() -> nn.Sequential:
    """Two convs and two Linears on 1×14×14, with a gate for each input of the first Linear."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.ReLU(),
        nn.Linear(7, 3),
    )


def lenet_plan() -> Plan:
    one, two, fine, hidden = Slots(0, 0, 4), Slots(1, 0, 5), Slots(2, 0, 20), Slots(3, 0, 7)
    flattened = Gated(Prod((two, Const(4))), fine)
    return Plan(
        axes=(
            Axis("0", "channel", 4, 0, 9),
            Axis("3", "channel", 5, 4, 36),
            Axis("7.inputs", "neuron", 20, 9, 7),
            Axis("7", "neuron", 7, 29, 3),
        ),
        pins=(),
        tensors={
            "0.weight": (one, Const(1), Const(3), Const(3)),
            "0.bias": (one,),
            "3.weight": (two, one, Const(3), Const(3)),
            "3.bias": (two,),
            "7.weight": (hidden, flattened),
            "7.bias": (hidden,),
            "9.weight": (Const(3), hidden),
            "9.bias": (Const(3),),
        },
        sites=(
            Site("3.weight", 1, one, "read"),
            Site("7.weight", 1, flattened, "read"),
            Site("9.weight", 1, hidden, "read"),
        ),
        costs=(),
    )


def bank(
    plan: Plan, seed: int = 0, dtype: torch.dtype = torch.float32, kind: Gate | None = None
) -> Gates:
    """Gates all over the range, some closed in eval mode, some open, some between."""
    generator = torch.Generator().manual_seed(seed)
    log_alpha = torch.randn(plan.size, generator=generator).mul(2).to(dtype)
    return Gates(plan, kind or HardConcrete(), log_alpha)


def gated(model: nn.Module, plan: Plan, seed: int = 0, kind: Gate | None = None) -> nn.Module:
    """The model with such a bank attached."""
    attach(model, bank(plan, seed, next(model.parameters()).dtype, kind))
    return model


def folded(model: nn.Module, plan: Plan, z: Tensor) -> nn.Module:
    """Multiply z into the plain parameters of an ungated model, the textbook way."""
    with torch.no_grad():
        for site in plan.sites:
            parameter = model.get_parameter(site.tensor)
            shape = [1] * parameter.dim()
            shape[site.dim] = -1
            parameter.mul_(plan.spread(site.layout, z).view(shape))
    return model
