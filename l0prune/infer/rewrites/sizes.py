"""Sizes of dims before and after the cut, also where they are symbolic."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from l0prune.capture.compat import OpOverload
from l0prune.infer.nodes import hint, operator_name
from l0prune.plan.layout import Layout, axes_of, size_of
from l0prune.plan.plan import Plan


@dataclass
class Sizes:
    """What each dim of each node of a captured graph measures once closed slots are gone.

    ``picks`` and ``closed`` are the analysis' own.
    """

    plan: Plan
    kept: Tensor
    layouts: dict[str, tuple]
    picks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    closed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _known: dict[Layout, int] = field(default_factory=dict)

    def of(self, layout: Layout) -> int:
        """The size of a dim with this layout after the cut."""
        if layout not in self._known:
            whole = not axes_of(layout)
            size = size_of(layout) if whole else int(self.plan.mask(layout, self.kept).sum())
            self._known[layout] = size
        return self._known[layout]

    def dims(self, node: Node) -> tuple[Layout, ...]:
        """The layouts of a tensor node's dims."""
        return self.layouts[node.name]

    def stands_for(self, new: Node, old: Node) -> None:
        """A rewrite put ``new`` in the place of ``old``: it has its layouts."""
        self.layouts[new.name] = self.layouts[old.name]
        self._origins[new.name] = self.origin(old)

    def origin(self, node: Node) -> str:
        """What the capture calls the node, or that in whose place it is."""
        return self._origins.get(node.name, node.name)

    def mask(self, layout: Layout) -> Tensor:
        """Which positions of a dim stay: bool, shape (old size,)."""
        return self.plan.mask(layout, self.kept)

    def changes(self, layout: Layout) -> bool:
        """Whether anything of the dim is cut."""
        return self.of(layout) != size_of(layout)

    def fitted(self, graph: Graph, value: Any, layout: Layout) -> Any:
        """A size argument of a call, made right for the dim that it describes.

        A number becomes the new number. A symbolic size is left alone where it comes out right
        by itself, because it is read off a tensor that is cut too; else it is rescaled.
        """
        if not isinstance(value, Node):
            return value if value == -1 else self.of(layout)
        now, wanted = self._value(value), self.of(layout)
        if now == wanted:
            return value
        with graph.inserting_after(value):
            scaled = graph.call_function(operator.mul, (value, wanted))
        with graph.inserting_after(scaled):
            return graph.call_function(operator.floordiv, (scaled, now))

    def _value(self, node: Node) -> int:
        """What a symbolic size will be, with the example's batch, after the cut."""
        if operator_name(node.target) == "aten.sym_size":
            source, dim = node.args[:2]
            assert isinstance(source, Node)
            assert isinstance(dim, int)
            if source.name in self.layouts:
                return self.of(self.dims(source)[dim])
        elif node.op == "call_function" and not isinstance(node.target, OpOverload):
            values = [self._value(a) if isinstance(a, Node) else a for a in node.args]
            return int(node.target(*values))  # type: ignore[operator]
        return hint(node.meta["val"])
