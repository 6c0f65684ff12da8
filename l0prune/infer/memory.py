"""Values of a graph that lie in one memory, and who reads what is written into it in place."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator

from torch.fx import Graph, Node

from l0prune.infer.nodes import may_view, written


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
