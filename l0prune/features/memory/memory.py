"""Memory as a measure: what a network takes when it serves, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.features.memory import BYTES
from l0prune.features.memory.cache import cached
from l0prune.features.memory.conditions import DTYPES, EXAMPLES, Conditions
from l0prune.gating.attaching import holder, weights_of
from l0prune.infer.dataflow import folded
from l0prune.plan.branch import KIND, in_switches
from l0prune.plan.cost import Amounts, Axes, CostModel
from l0prune.plan.layout import Layouts
from l0prune.plan.measures import Measure, register
from l0prune.plan.numbers import in_thousands
from l0prune.plan.plan import Cost, Plan
from l0prune.plan.switches import switch

CACHE, ACTIVATIONS = "the cache of keys and values", "the activations of one call"


@register
class Memory(Measure):
    """Bytes of stored tensors, of the cache at a context, and of activations at their peak.

    Stored tensors are parameters and buffers. Activations are the values of the captured graph
    that are needed at once, for a call with as many examples as the batch, each of the size of the
    example that the model was gated with. An operator's scratch memory is not among them.

    Args:
        plan: of the network.
        costs: terms of the stored tensors and the cache.
        batch: examples of one call.
    """

    name, label = "memory", "memory"
    suffixes: ClassVar = BYTES
    conditions = EXAMPLES

    def __init__(self, plan: Plan, costs: list[Cost], batch: int) -> None:
        super().__init__(plan)
        self.costs = CostModel(plan, costs)
        values = [each.of_examples(batch) for each in plan.activations]
        self._sizes = Amounts(plan, values)
        self._made = torch.tensor([each.made for each in values])
        self._gone = torch.tensor([each.last + 1 for each in values])

    @classmethod
    def of(cls, plan: Plan) -> Measure:
        """Raise UsageError: a plan alone does not determine the bytes of each tensor."""
        raise UsageError(f"{cls.name} is counted of a gated model, for a budget such as {EXAMPLES}")

    @classmethod
    def of_model(cls, model: nn.Module, plan: Plan, at: str) -> Measure:
        """Return the memory of a gated model, under conditions such as ``8x4096``."""
        conditions = Conditions.of(at)
        itemsize = DTYPES.get(conditions.dtype)
        costs = [*_stored(model, plan, itemsize)]
        numbers = {axis.name: n for n, axis in enumerate(plan.axes) if axis.kind == KIND}
        for tensor, dims, needed in cached(model, plan, conditions):
            whole = _cost(CACHE, tensor, dims, itemsize)
            for switches, sign in in_switches(needed, numbers).items():
                under = (*whole.dims, *map(switch, sorted(switches)))
                costs.append(replace(whole, scale=sign * whole.scale, dims=under))
        return cls(plan, costs, conditions.batch)

    def expected(self, p: Tensor, dtype: torch.dtype | None = None, through: Axes = None) -> Tensor:
        """The expected amount at open probabilities ``p``; see ``Measure``."""
        stored = self.costs.expected(p, self.name, dtype=dtype, through=through)
        return stored + self._peak(p, through).to(stored.dtype)

    def by_owner(self, kept: Tensor) -> dict[str, float]:
        """Return the bytes of each module's tensors, by path, of the cache and of activations."""
        stored = self.costs.by_owner(kept, self.name)
        return stored | {ACTIVATIONS: float(self._peak(kept, None))}

    def _peak(self, p: Tensor, through: Axes) -> Tensor:
        """Return the bytes of the values that are needed at the fullest step."""
        sizes = self._sizes.expected(p, through)
        change = sizes.new_zeros(int(self._gone.max()) + 1)
        change = change.index_add(0, self._made.to(p.device), sizes)
        change = change.index_add(0, self._gone.to(p.device), -sizes)
        return change.cumsum(0).max()

    @classmethod
    def show(cls, amount: float) -> str:
        """Format an amount with all digits: ``6,442,450,944 B``."""
        return f"{round(amount):,} B"

    @classmethod
    def brief(cls, amount: float) -> str:
        """Format an amount with three digits: ``6.44 GB``."""
        return in_thousands(amount, (" B", " kB", " MB", " GB", " TB"))


def _stored(model: nn.Module, plan: Plan, itemsize: int | None) -> Iterator[Cost]:
    """Yield the bytes of parameters and buffers, without those that no export has."""
    root, gates = holder(model)
    weights = weights_of(root)
    counted = [cost for cost in plan.costs if cost.unit == "params"]
    for cost in counted:
        yield _scaled(cost, _bytes(weights[cost.tensor], itemsize))
    of_gates = {*map(id, gates.buffers())}
    for name, buffer in root.named_buffers():
        if id(buffer) in of_gates:
            continue
        dims = plan.tensors.get(plan.aliases.get(name, name), ())
        owner, size = name.rpartition(".")[0], _bytes(buffer, itemsize)
        # beside a parameter of the same dims, as in a norm, it goes with the same branches
        of = [c for c in counted if c.owner == owner and plan.tensors[c.tensor] == dims]
        if of:
            yield from (_scaled(each, size) for each in of if each.tensor == of[0].tensor)
        else:
            yield _cost(owner, buffer, dims, itemsize)


def _scaled(cost: Cost, size: int) -> Cost:
    return replace(cost, unit=Memory.name, scale=cost.scale * size)


def _cost(owner: str, tensor: Tensor, dims: Layouts, itemsize: int | None) -> Cost:
    """Return the bytes of a tensor, some of whose dims may have axes."""
    _, cut = folded(1.0, dims)
    whole = tensor.numel() * _bytes(tensor, itemsize)
    return Cost(owner, Memory.name, whole / prod(dim.size for dim in cut), cut)


def _bytes(tensor: Tensor, itemsize: int | None) -> int:
    return itemsize if itemsize and tensor.is_floating_point() else tensor.dtype.itemsize
