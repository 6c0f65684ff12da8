"""Gated tensors from ``named_parameters()`` and ``named_buffers()`` during a model's forward.

A forward that changes its weights for one call (``functional_call``, fast weights, a weight made
of two) takes them from there. Outside of the forward they are the stored ones, as optimizers need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.gating.bank import Gates
from l0prune.gating.gated_class import Computed
from l0prune.gating.multiplying import held

METHODS = ("named_parameters", "named_buffers")


class NamedMembers:
    """A module's method of this name, which yields gated tensors while the model runs.

    It is an attribute of the module: a container whose layers are gated has no class of ours.
    """

    def __init__(self, module: nn.Module, name: str, gates: Gates) -> None:
        self.module, self.name, self.gates = module, name, gates

    def __call__(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors as the method of the module's class does."""
        found = getattr(type(self.module), self.name)(self.module, prefix, *args, **kwargs)
        for name, stored in found:
            acts = self.gates.in_forward and not self.gates.bypassed
            yield name, self._gated(name.removeprefix(f"{prefix}."), stored) if acts else stored

    def _gated(self, name: str, stored: Tensor) -> Tensor:
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        read: Tensor = getattr(owner, leaf)
        if read is stored or held(owner, leaf) is not stored or torch.compiler.is_compiling():
            return read
        return Computed.of(read, stored)


def gate_members(model: nn.Module, gates: Gates) -> None:
    """Put these methods on a model's modules, if its forward reads what they yield."""
    for module in model.modules() if gates.plan.code.by_name else ():
        for name in METHODS:
            vars(module).setdefault(name, NamedMembers(module, name, gates))


def ungate_members(module: nn.Module) -> None:
    """Remove these methods from a module."""
    for name in METHODS:
        if isinstance(vars(module).get(name), NamedMembers):
            del vars(module)[name]
