"""Intermediate values of a network, with their size and lifetime, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from l0prune.plan.layout import Layout, Layouts


@dataclass(frozen=True, slots=True)
class Activation:
    """Memory of ``scale × Π open size of dims`` bytes that the graph fills: a value and its views.

    It is needed from the step that makes it through the last one that reads it, both included.
    Steps are the calls of the captured graph, counted from 0. Inputs of the model exist from the
    first step on, and its outputs are needed through the last one.

    Attributes:
        owner: path of the module that makes it.
        scale: bytes of one position, times the number of positions along dims without an axis.
        dims: layouts of the other dims.
        made: the step that makes it.
        last: the last step that reads it.
        is_fixed: whether its size does not depend on the batch, as it is computed from stored
            tensors alone; else ``scale`` is for one example.
    """

    owner: str
    scale: float
    dims: Layouts
    made: int
    last: int
    is_fixed: bool = False

    def map(self, change: Callable[[Layout], Layout]) -> Activation:
        """Return a copy with every layout converted by ``change``."""
        return replace(self, dims=tuple(map(change, self.dims)))

    def later(self, steps: int) -> Activation:
        """Return a copy for a graph that runs ``steps`` later."""
        return replace(self, made=self.made + steps, last=self.last + steps)

    def of_examples(self, count: float) -> Activation:
        """Return a copy that counts ``count`` examples as one."""
        return self if self.is_fixed else replace(self, scale=self.scale * count)


def steps(activations: Sequence[Activation]) -> int:
    """Return the number of steps until the last activation is read."""
    return max((each.last + 1 for each in activations), default=0)
