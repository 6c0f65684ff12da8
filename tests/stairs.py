"""A measure that goes up and down in steps, as a runtime's times do."""

from contextlib import contextmanager

import torch

from l0prune.plan.cost import CostModel
from l0prune.plan.measures import MEASURES, SumOfTerms, register
from l0prune.plan.plan import Cost

BLOCK = 4


class Stairs(SumOfTerms):
    """Macs in blocks of 4 slots, and half as much again where a width does not fit them.

    ``factor`` and ``overhead`` make of it what is observed; None where nothing is.
    """

    name, label, suffixes = "stairs", "steps", {"st": 1.0, "kst": 1e3}
    factor = None
    overhead = 0.0
    looked = 0

    def __init__(self, plan):
        costs = [Cost(c.owner, self.name, c.scale, c.dims) for c in plan.costs if c.unit == "macs"]
        super().__init__(plan, CostModel(plan, costs))

    def actual(self, open_, through=None):
        kept, misses = self.plan.kept(open_).double(), 0
        for axis in self.plan.axes:
            width = int(kept[axis.slice].sum())
            misses += bool(width % BLOCK) and width < axis.size
            wide = min(axis.size, -(-width // BLOCK) * BLOCK)
            filled = torch.zeros(axis.size, dtype=torch.float64)
            filled[:wide] = 1
            kept[axis.slice] = filled
        return self.costs.amount(kept, self.name, through) * (1 + 0.5 * misses)

    def dense(self, through=None):
        return self.actual(torch.ones(self.plan.size, dtype=torch.bool), through)

    def blocks(self):
        return [BLOCK] * len(self.plan.axes)

    def observed(self, model):
        if self.factor is None:
            return None
        import l0prune

        type(self).looked += 1
        return self.factor * self.actual(l0prune.gates(model).open()) + self.overhead


@contextmanager
def registered(kind):
    """The measure among those that there are, and afterwards no more."""
    register(kind)
    try:
        yield kind
    finally:
        del MEASURES[kind.name]
