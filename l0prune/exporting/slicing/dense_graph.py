"""The dense network as a graph: a module that copies and pickles with all that it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from l0prune.capture.batches import ANY, Batches
from l0prune.capture.compat import PRESERVED, size_expression

_ATEN = torch.ops.aten


class DenseGraph(GraphModule):
    """A captured graph that asks of its inputs what the capture took for granted.

    What torch.export makes of a program asks that in hooks, which copies lose and pickle refuses.
    Here it is nodes of the graph (``add_guards``), so that copies, pickles and whatever is
    exported again ask the same.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """As fx pickles a graph of single tensors, and the structure of inputs and output."""
        flat = Graph()
        flat.output(flat.graph_copy(self.graph, {}))
        kept = (PRESERVED, *(key for key in self.meta if str(key).startswith("l0prune_")))
        meta = {key: self.meta[key] for key in kept if key in self.meta}
        return _restored, (GraphModule(self, flat), self.graph._codegen, meta, self.training)


def _restored(flat: GraphModule, codegen: CodeGen, meta: dict[str, Any], mode: bool) -> DenseGraph:
    flat.graph.set_codegen(codegen)
    module = DenseGraph(flat, flat.graph)
    module.meta.update(meta)
    for name, value in meta.get(PRESERVED, {}).items():
        setattr(module, name, value)
    module.train(mode)
    return module


def add_guards(graph: Graph, values: Iterable[Any], batches: Batches = ANY) -> None:
    """Let the graph raise a RuntimeError on inputs that it was not captured for.

    Args:
        graph: to be changed; its module is to be recompiled.
        values: for each placeholder what it was captured with: a number, a text, None, or a
            tensor (a fake one), of which a symbolic size stands for any.
        batches: those that it is for, where their size is symbolic.
    """
    inputs = graph.find_nodes(op="placeholder")
    sizes: dict[Any, Node] = {}
    with graph.inserting_before(inputs[-1].next):
        for node, value in zip(inputs, values, strict=True):
            if isinstance(value, Tensor):
                _guard_shape(graph, node, value, sizes, batches)
            else:
                _assert(graph, operator.eq, node, value, f"{node.name} has to be {value!r}")


def _guard_shape(
    graph: Graph, node: Node, value: Tensor, sizes: dict[Any, Node], batches: Batches
) -> None:
    """Assert dims and sizes; equal symbols are equal sizes."""
    rank = graph.call_method("dim", (node,))
    _assert(graph, operator.eq, rank, value.ndim, f"{node.name} has to have {value.ndim} dims")
    for dim, expected in enumerate(value.shape):
        what = f"dim {dim} of {node.name} has to"
        found = graph.call_function(_ATEN.sym_size.int, (node, dim))
        if isinstance(expected, int):
            _assert(graph, operator.eq, found, expected, f"{what} measure {expected}")
            continue
        symbol = size_expression(expected)
        if symbol in sizes:
            other = sizes[symbol].args[0]
            _assert(graph, operator.eq, found, sizes[symbol], f"{what} measure what {other} does")
        elif dim == 0 and batches.least > 1:
            _assert(graph, operator.ge, found, batches.least, f"{what} measure {batches}")
            if batches.multiple > 1:
                rest = graph.call_function(operator.mod, (found, batches.multiple))
                _assert(graph, operator.eq, rest, 0, f"{what} measure {batches}")
        sizes.setdefault(symbol, found)


def _assert(
    graph: Graph, relation: Callable[[Any, Any], Any], found: Node, wanted: Any, text: str
) -> None:
    holds = graph.call_function(relation, (found, wanted))
    why = f"{text}, as when this graph was captured"
    graph.call_function(_ATEN._assert_scalar.default, (holds, why))
