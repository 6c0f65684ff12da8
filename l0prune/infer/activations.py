"""The values of a captured graph: how large each is, and from when until when it is needed.

Values of a graph that lie in one memory, and who reads what is written into it in place.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from l0prune.capture.provenance import module_of
from l0prune.infer.expressions import Const, Expr
from l0prune.infer.inference import Inference
from l0prune.infer.nodes import hint, may_view, written
from l0prune.plan.activations import Activation
from l0prune.plan.layout import Layout, Layouts, axes_of, size_of


@dataclass
class _Storage:
    """Memory that a node fills, and that views of it share."""

    node: Node
    tensor: Tensor
    dims: tuple[Expr, ...]
    made: int
    last: int


def activations(infer: Inference, layout: Callable[[Expr], Layout]) -> Iterator[Activation]:
    """The values of the graph that inference went through, in the order in which they are made.

    Stored tensors are none of them. Two values are one where torch said of the example that they
    lie in the same memory.
    """
    stored = {
        key
        for node in infer.captured.graph.find_nodes(op="placeholder")
        if node.name in infer.captured.names
        for key, _ in _tensors(node)
    }
    for storage in _storages(infer, stored):
        is_fixed = infer.is_weight(storage.node)
        scale = storage.tensor.dtype.itemsize / (1 if is_fixed else infer.captured.batch)
        scale, dims = folded(scale, tuple(map(layout, storage.dims)))
        owner = module_of(storage.node)
        yield Activation(owner, scale, dims, storage.made, storage.last, is_fixed)


def _storages(infer: Inference, stored: set[Hashable]) -> list[_Storage]:
    found: dict[Hashable, _Storage] = {}
    step = -1
    for node in infer.captured.graph.nodes:
        step += node.op == "call_function"
        now = max(step, 0)
        for operand in node.all_input_nodes:
            for key, _ in _tensors(operand):
                if key in found:
                    found[key].last = now
        for number, (key, tensor) in enumerate(_tensors(node)):
            if key not in found and key not in stored:
                dims = _dims(infer, node, number, tensor)
                found[key] = _Storage(node, tensor, dims, now, now)
    return list(found.values())


def _tensors(node: Node) -> Iterator[tuple[Hashable, Tensor]]:
    """The node's tensors, each with what is the same of all tensors in the same memory."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    for number, tensor in enumerate(each for each in values if isinstance(each, Tensor)):
        key: Hashable = (node.name, number)
        with suppress(
            NotImplementedError
        ):  # sparse ones, and those inside of torch.func, have none
            key = tensor.untyped_storage()._cdata
        yield key, tensor


def _dims(infer: Inference, node: Node, number: int, tensor: Tensor) -> tuple[Expr, ...]:
    """One expression per dim of one of the node's tensors."""
    value = infer.values.get(node)
    of = value[number : number + 1] if isinstance(value, list) else [value]
    if of and of[0] is not None and len(of[0]) == tensor.dim():
        return of[0]
    return tuple(Const(hint(size)) for size in tensor.shape)


def folded(scale: float, dims: Layouts) -> tuple[float, Layouts]:
    """A product with its constant dims in the scale, and the dims that are left."""
    for dim in dims:
        if not axes_of(dim):
            scale *= size_of(dim)
    return scale, tuple(dim for dim in dims if axes_of(dim))


class Memory:
    """Of a graph as it was captured.

    A view lies in the memory of what it is of, and so does what an operator in place gives.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self._base: dict[Node, Node] = {}
        self._values: dict[Node, list[Node]] = defaultdict(list)  # by what they are views of
        self._writers: dict[Node, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            base = self._base[node] = self._found(node)
            self._values[base].append(node)
            target = written(node)
            if target is not None:
                self._writers[self._base[target]].append(node)

    def _found(self, node: Node) -> Node:
        of = node.args[0] if node.args else None
        is_view = node.op == "call_function" and (node.target is operator.getitem or may_view(node))
        return self._base[of] if is_view and isinstance(of, Node) else node

    def base(self, node: Node) -> Node:
        """The value in whose memory the node's may lie; itself where that is its own."""
        return self._base[node]

    def writers(self, node: Node) -> list[Node]:
        """Return what writes in place into the memory in which the node's value lies."""
        return self._writers[self._base[node]]

    def readers(self, node: Node) -> Iterator[Node]:
        """Its users; of a node that writes also all that look into that memory later."""
        yield from node.users
        target = written(node)
        if target is not None:
            for value in self._values[self._base[target]]:
                later = (user for user in value.users if self._order[user] > self._order[node])
                yield from later

    def sources(self, node: Node) -> Iterator[Node]:
        """What it reads, and what has written into that before; the other way round."""
        for value in node.all_input_nodes:
            yield value
            earlier = self._writers[self._base[value]]
            yield from (each for each in earlier if self._order[each] < self._order[node])
