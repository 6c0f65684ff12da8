"""Layers that can be in eight bits, and the points between them, found on the captured graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

from torch import nn
from torch.fx import Node

from l0prune.capture.capture import Captured
from l0prune.capture.compat import ConvolutionBase
from l0prune.capture.provenance import module_of, modules_of, within, without_call
from l0prune.features.int8.ranges import QuantizedLayer, Scheme
from l0prune.infer.nodes import PERMUTATIONS, RESHAPES, argument, operator_name

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVOLUTIONS = tuple(f"aten.conv{dims}d" for dims in (1, 2, 3))
_RELU = ("aten.relu", "aten.relu_")
_CLIPS = ("aten.hardtanh", "aten.hardtanh_")
_MOVES = (*RESHAPES, *PERMUTATIONS, *(f"aten.{name}" for name in ("contiguous", "clone", "detach")))
# Operators that leave numbers on their grid; 0 is on every grid.
_KEEPS = frozenset((*_RELU, *_MOVES, *(f"aten.max_pool{dims}d" for dims in (1, 2, 3))))
# Zeros that padding adds are on every grid, too.
_KEEPS_IN_SUMS = _KEEPS | {"aten.slice", "aten.constant_pad_nd", "aten.pad"}


def quantized_layers(captured: Captured, model: nn.Module, *, sums: bool = True) -> Scheme:
    """Find the layers that can be in eight bits: Linear and convolution modules called once.

    The output of a convolution is rounded to a grid, after the BatchNorm that follows: one on
    integers writes integers. So is the sum of such an output and a value on a grid, if a module
    returns it, as a residual block does. Other sums, norms and products of activations stay in
    floating point, and so does a layer that is called several times.

    Args:
        captured: the graph.
        model: the model of the graph.
        sums: whether sums are rounded to grids.
    """
    return _Finder(captured, model).found(sums)


class _Finder:
    def __init__(self, captured: Captured, model: nn.Module) -> None:
        self._captured, self._model = captured, model
        self._inside = {node: modules_of(node) for node in captured.graph.nodes}
        self._bounds: list[tuple[float, float]] = []
        self._points: dict[Node, int] = {}  # by the value
        self._clips: set[Node] = set()
        self._outputs: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._parts: dict[int, int] = {}  # points of sums, by those of the added values

    def found(self, sums: bool) -> Scheme:
        """Find the layers, the outputs of convolutions, their sums, then each layer's input."""
        layers = dict(self._once(self._is_layer))
        norms = {node: path for path, node in self._once(self._is_norm)}
        written = {
            path: self._written(path, node, norms)
            for path, node in layers.items()
            if operator_name(node.target) in _CONVOLUTIONS
        }
        if sums:
            for node in self._captured.graph.nodes:
                self._sum(node)
        made = []
        for path, node in layers.items():
            read = node.args[0]
            assert isinstance(read, Node)
            reads, quantizes = self._on_grid(read), False
            if reads is None:
                reads, quantizes = self._point(_unmoved(read)), True
            weight = self._captured.names[argument(node, 1, "weight").name]
            writes = written.get(path)
            adds_to = None if writes is None else self._parts.get(writes)
            made.append(QuantizedLayer(path, weight, reads, quantizes, writes, adds_to))
        return Scheme(tuple(made), tuple(self._bounds), self._outputs, self._sums)

    def _once(self, is_one: Callable[[Node], bool]) -> Iterator[tuple[str, Node]]:
        """Yield such nodes of modules that have exactly one of them, with the module's path."""
        found: dict[str, list[Node]] = {}
        for node in self._captured.graph.nodes:
            if node.op == "call_function" and is_one(node):
                found.setdefault(without_call(module_of(node)), []).append(node)
        yield from ((path, nodes[0]) for path, nodes in found.items() if len(nodes) == 1)

    def _is_layer(self, node: Node) -> bool:
        if operator_name(node.target) not in (*_CONVOLUTIONS, "aten.linear"):
            return False
        module, weight = self._module(node), argument(node, 1, "weight")
        if not isinstance(module, ConvolutionBase | nn.Linear):
            return False
        own = within(without_call(module_of(node)), "weight")
        stored = self._captured.names.get(getattr(weight, "name", ""))
        return stored == self._captured.aliases.get(own, own)

    def _is_norm(self, node: Node) -> bool:
        is_one = operator_name(node.target) == "aten.batch_norm"
        return is_one and isinstance(self._module(node), BATCH_NORMS)

    def _module(self, node: Node) -> nn.Module | None:
        """Return the module that made a node; None where torch does not know its path.

        It may not where a container holds a module twice.
        """
        try:
            return self._model.get_submodule(without_call(module_of(node)))
        except AttributeError:
            return None

    def _written(self, path: str, node: Node, norms: dict[Node, str]) -> int:
        """Add a point for a convolution's output, and record the module that returns it."""
        users = list(node.users)
        if len(users) == 1 and users[0] in norms:
            node, path = users[0], norms[users[0]]
        after = list(node.users)
        name = operator_name(after[0].target) if len(after) == 1 else ""
        bounds = (-math.inf, math.inf)
        if name in _RELU:
            bounds = (0.0, math.inf)
        elif name in _CLIPS:
            low, high = (float(argument(after[0], n, "", (-1, 1)[n - 1])) for n in (1, 2))
            if low <= 0 <= high:
                bounds = (low, high)
                self._clips.add(after[0])
        self._outputs[path] = self._point(node, bounds)
        return self._outputs[path]

    def _point(self, node: Node, bounds: tuple[float, float] = (-math.inf, math.inf)) -> int:
        if node not in self._points:
            self._points[node] = len(self._bounds)
            self._bounds.append(bounds)
        return self._points[node]

    def _sum(self, node: Node) -> None:
        """Round a sum to a grid where all operands are on one, and a module returns the sum.

        The sum of a convolution's output and a stream is on the grid of the stream: where the
        branch is removed, the stream is unchanged.
        """
        if operator_name(node.target) not in ("aten.add", "aten.add_"):
            return
        after = list(node.users)
        has_relu = len(after) == 1 and operator_name(after[0].target) in _RELU
        value = after[0] if has_relu else node
        parts = [each for each in node.args[:2] if isinstance(each, Node)]
        points = [self._on_grid(each, _KEEPS_IN_SUMS) for each in parts]
        owner = self._returning(value)
        written = [self._points[each] for each in parts if self._is_part(each)]
        if owner is None or len(points) < 2 or None in points or not written:
            return
        streams = [point for point in points if point not in written]
        point = streams[0] if streams else self._point(value)
        assert point is not None
        low, high = self._bounds[point]
        if high != math.inf or (low == 0 and not has_relu):
            return
        self._points[value] = self._sums[owner] = point
        self._parts |= dict.fromkeys(written, point)

    def _is_part(self, node: Node) -> bool:
        """Return whether a value is the output of a layer and has only one user."""
        made = self._points.get(node)
        return made in self._outputs.values() and len(node.users) == 1

    def _returning(self, node: Node) -> str | None:
        """Return the path of a module that is called once and returns this value alone."""
        if any(user.op == "output" for user in node.users):
            return None
        inside = self._inside
        for path in reversed(inside[node]):
            leaving = [
                each
                for each, paths in inside.items()
                if path in paths and any(path not in inside[user] for user in each.users)
            ]
            if path and leaving == [node]:
                return path
        return None

    def _on_grid(self, node: Node, kept: Collection[str] = _KEEPS) -> int | None:
        """Return the number of the point on whose grid a value is; None for none.

        Args:
            node: the value.
            kept: operators that leave numbers on their grid.
        """
        known = {*self._outputs.values(), *self._sums.values()}
        while self._points.get(node) not in known:
            keeps = operator_name(node.target) in kept or node in self._clips
            if node.op != "call_function" or not keeps or not isinstance(node.args[0], Node):
                return None
            node = node.args[0]
        return self._points[node]


def _unmoved(node: Node) -> Node:
    """Return the value behind reshapes, permutations and copies."""
    while operator_name(node.target) in _MOVES and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
