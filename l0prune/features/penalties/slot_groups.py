"""Weight groups of slots, and the stiffness of each weight under its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError
from l0prune.gating.attaching import weights_of
from l0prune.gating.bank import Gates
from l0prune.plan.layout import axes_of
from l0prune.plan.switches import switches_of
from l0prune.running.processes import is_sharded


class Part(NamedTuple):
    """A parameter, its dim, the dim's slots ``(factors, size)``, and whether gates multiply it."""

    parameter: nn.Parameter
    dim: int
    table: Tensor
    is_read: bool

    def along(self, values: Tensor) -> Tensor:
        """Reshape values of each position to broadcast against the parameter."""
        shape = [1] * self.parameter.dim()
        shape[self.dim] = -1
        return values.view(shape)

    def summed(self, elements: Tensor) -> Tensor:
        """Return the sum of ``elements`` at each position of the dim."""
        others = [dim for dim in range(elements.dim()) if dim != self.dim]
        return elements.sum(others) if others else elements


class Groups:
    """The groups of a model as it is now, whole or cut.

    Attributes:
        parts: parameters by dim, of which groups consist.
        usable: slots all of whose gates multiply parameters that learn; bool, ``(plan.size,)``.
            Switches of whole branches are not: a branch is removed with the last of its slots.
        counts: elements of each group, at least 1.
        kept: slots to which the model was cut when this was made; None if it was whole.
    """

    def __init__(self, root: nn.Module, gates: Gates) -> None:
        plan, self.kept, self._size = gates.plan, gates.kept, gates.plan.size
        sites = {(site.tensor, site.dim) for site in plan.sites}
        device = gates.log_alpha.device
        self.parts: list[Part] = []
        held = set()
        for alias, parameter in weights_of(root).items():
            name, learns = plan.aliases.get(alias, alias), parameter.requires_grad
            if is_sharded(parameter):
                raise UsageError("a penalty on groups needs whole weights: use distributed='ddp'")
            for dim, layout in enumerate(plan.tensors.get(name, ()) if learns else ()):
                if axes_of(layout) and (parameter.dim() > 1 or (name, dim) in sites):
                    table = plan.gate_table(layout)
                    if self.kept is not None:
                        table = table[:, plan.mask(layout, self.kept)]
                    is_read = (name, dim) in sites
                    self.parts.append(Part(parameter, dim, table.to(device), is_read))
                    held.add((name, dim))
        usable = ~switches_of(plan)
        for site in plan.sites:
            if (site.tensor, site.dim) not in held:
                for axis in axes_of(site.layout):
                    usable[plan.axes[axis].slice] = False
        self.usable = usable.to(device)
        ones = self.sums(lambda part: torch.ones_like(part.parameter, dtype=torch.float32))
        self.counts = ones.clamp(min=1)

    def sums(self, elements: Callable[[Part], Tensor]) -> Tensor:
        """Return for each slot the sum of ``elements`` over its group; shape ``(plan.size,)``."""
        return self.added([elements(part) for part in self.parts])

    def added(self, elements: Sequence[Tensor]) -> Tensor:
        """Return the same sum as ``sums``, from one tensor for each part."""
        total: Tensor | None = None
        for part, of in zip(self.parts, elements, strict=True):
            summed = part.summed(of).to(part.table.device)
            if total is None:
                total = summed.new_zeros(self._size + 1)
            for row in part.table:
                total.index_add_(0, row, summed.to(total.dtype))
        assert total is not None
        return total[:-1]

    def at(self, part: Part, values: Tensor) -> Tensor:
        """Return the product of the slots' values at each position, shaped as ``Part.along``."""
        padded = torch.cat([values, values.new_ones(1)])
        return part.along(padded[part.table].prod(0)).to(part.parameter.device)


def squares(part: Part) -> Tensor:
    """Return the square of each element, float32."""
    value = part.parameter.detach()
    return (value.abs() if value.is_complex() else value).float().square()


class Metric:
    """Stiffness of each weight under its optimizer: the inverse of its step at a gradient of 1.

    For Adam and its kind that is (√v̂ + ε)/rate, else 1/rate.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._of: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
            id(p): (group, optimizer.state.get(p, {}))
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._known: dict[int, Tensor] = {}
        rates = {float(group["lr"]) for group, _ in self._of.values()}
        self.is_still = rates == {0.0}
        self.is_adaptive = any("exp_avg_sq" in state for _, state in self._of.values())

    def of(self, part: Part) -> Tensor:
        """Return h, the stiffness, of each element of the part's parameter, float32."""
        return self.at(part.parameter)

    def at(self, parameter: nn.Parameter) -> Tensor:
        """Return h, the stiffness, of each element of a parameter, float32, of its shape."""
        if id(parameter) not in self._known:
            self._known[id(parameter)] = self._computed(parameter)
        return self._known[id(parameter)]

    def _computed(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self._of:
            raise UsageError(
                "penalty acts after the optimizer's step, and no optimizer that is known holds a "
                "weight that it is about: pruner.before_step(optimizer), with all that step"
            )
        group, state = self._of[id(parameter)]
        rate = max(float(group["lr"]), 1e-30)
        like = torch.ones_like(parameter, dtype=torch.float32)
        if "exp_avg_sq" not in state:
            return like / rate
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"]).float()
        beta = float(group["betas"][1])
        passed = 1 - beta ** float(state["step"])
        found: Tensor = like * ((second / passed).sqrt() + group["eps"]) / rate
        return found
