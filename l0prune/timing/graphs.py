"""A gated model at any widths as a graph for PyTorch: captured once, cut as often as asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from l0prune.capture.held_inputs import plain
from l0prune.exporting.slicing.chosen import chosen_slots
from l0prune.exporting.slicing.graph import dense_graphs
from l0prune.exporting.slicing.tensors import cut_tensors
from l0prune.exporting.subject import subject_of, surveyed
from l0prune.gating.attaching import holder
from l0prune.timing.parts import check_whole

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Graphs:
    """The networks of one gated model, in float32.

    Args:
        model: the gated model; it stays as it is.
        batch: examples in a call.

    Raises:
        NotGated: the model carries no gates.
        UsageError: it was captured in parts.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        gated, _ = holder(model)
        self._subject = subject_of(gated)
        self._parts = surveyed(self._subject)
        self.plan = self._subject.plan
        check_whole(self.plan.parts)
        self._batch = batch

    def network(self, open_: Tensor) -> GraphModule:
        """The network in which these slots are open; bool, flat."""
        subject = replace(self._subject, z=open_.to(torch.float64))
        _, by_part = chosen_slots(subject, self._parts)
        tensors = cut_tensors(subject.plain, self._parts, by_part)
        (graph,) = dense_graphs(self._parts, by_part, tensors, subject.dtypes).values()
        return graph.float()

    def inputs(self) -> Inputs:
        """An example of the batch that is asked for."""

        def sized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = leaf.float() if leaf.is_floating_point() else leaf
            return value[torch.arange(self._batch) % len(value)] if value.ndim else value

        return plain(pytree.tree_map(sized, self._subject.example))
