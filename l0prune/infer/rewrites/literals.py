"""Rewrites of the shape literals of a captured graph, operator by operator.

Most operators take their sizes from their operands and need no rewrite. A rewrite is a function of
the sizes and a node; it changes the node's arguments in place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node

from l0prune.capture.compat import OpOverload
from l0prune.infer.nodes import SIZED, SLICES, SPLITS, argument, hint, operator_name
from l0prune.infer.rules.movement import PATTERNS, source
from l0prune.plan.layout import Layout, axes_of, outer
from l0prune.plan.plan import Plan


@dataclass
class Sizes:
    """Sizes of the dims of each node of a captured graph once closed slots are removed.

    ``picks`` and ``closed`` are those of the analysis.
    """

    plan: Plan
    kept: Tensor
    layouts: dict[str, tuple]
    picks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    closed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _known: dict[Layout, int] = field(default_factory=dict)

    @cached_property
    def _cut(self) -> frozenset[int]:
        """Numbers of the axes of which a slot is removed."""
        axes = enumerate(self.plan.axes)
        return frozenset(number for number, axis in axes if not self.kept[axis.slice].all())

    def of(self, layout: Layout) -> int:
        """The size of a dim with this layout after the cut."""
        if layout not in self._known:
            is_whole = self._cut.isdisjoint(axes_of(layout))
            size = layout.size if is_whole else int(self.plan.mask(layout, self.kept).sum())
            self._known[layout] = size
        return self._known[layout]

    def dims(self, node: Node) -> tuple[Layout, ...]:
        """The layouts of a tensor node's dims."""
        return self.layouts[node.name]

    def stands_for(self, new: Node, old: Node) -> None:
        """Record that a rewrite replaced ``old`` by ``new``, which has the same layouts."""
        self.layouts[new.name] = self.layouts[old.name]
        self._origins[new.name] = self.origin(old)

    def origin(self, node: Node) -> str:
        """Return the capture's name of the node, or of the one that it replaces."""
        return self._origins.get(node.name, node.name)

    def mask(self, layout: Layout) -> Tensor:
        """Return the positions of a dim that stay: bool, shape (old size,)."""
        return self.plan.mask(layout, self.kept)

    def changes(self, layout: Layout) -> bool:
        """Check whether anything of the dim is cut."""
        return self.of(layout) != layout.size

    def fitted(self, graph: Graph, value: Any, layout: Layout) -> Any:
        """Return a size argument of a call, corrected for the dim that it describes.

        A number becomes the new number. A symbolic size is unchanged where it is already right,
        because it is read off a tensor that is cut too; else it is rescaled.
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
        """Return a symbolic size after the cut, with the example's batch."""
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


Rewrite: TypeAlias = Callable[[Sizes, Node], None]
REWRITES: dict[str, Rewrite] = {}
# Prefix of the names of buffers with the kept entries of a tensor that the forward creates.
KEPT_ENTRIES = "kept_entries_of_"


def rewrites(*operators: str) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite for operators, by qualified name without overload."""

    def register(function: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(operators, function))
        return function

    return register


def rewrite_literals(graph: Graph, sizes: Sizes) -> None:
    """Correct every shape literal of the graph for the cut network."""
    for node in list(graph.nodes):
        rewrite = REWRITES.get(operator_name(node.target)) if node.op == "call_function" else None
        if rewrite is not None and node.name in sizes.layouts:
            rewrite(sizes, node)


@rewrites(*SIZED)
def sizes_of_output(sizes: Sizes, node: Node) -> None:
    """Correct the argument that lists the output's sizes."""
    position = SIZED[operator_name(node.target)]
    pairs = zip(node.args[position], sizes.dims(node), strict=True)  # type: ignore[arg-type]
    node.update_arg(position, [sizes.fitted(node.graph, size, layout) for size, layout in pairs])


@rewrites("aten.repeat", "aten.tile")
def copies(sizes: Sizes, node: Node) -> None:
    """Set the number of copies of a dim of size 1 to the number of kept slots."""
    counts: Any = list(node.args[1])  # type: ignore[arg-type]
    before = sizes.dims(source(node))
    for back, layout in enumerate(reversed(sizes.dims(node)[-len(counts) :]), start=1):
        is_one = back > len(before) or before[-back].size == 1
        if is_one and sizes.changes(layout):
            counts[-back] = sizes.of(layout)
    node.update_arg(1, counts)


@rewrites("aten.repeat_interleave")
def copies_in_a_row(sizes: Sizes, node: Node) -> None:
    """Set the number of copies of each slot to the number of kept slots of the copies' axis."""
    dim: Any = argument(node, 2, "dim")
    if dim is not None and sizes.changes(sizes.dims(node)[dim]):
        before, after = (sizes.of(sizes.dims(each)[dim]) for each in (source(node), node))
        node.update_arg(1, after // before)


@rewrites(*PATTERNS)
def entries_of_slots(sizes: Sizes, node: Node) -> None:
    """Pick the entries of the kept slots from a tensor with one entry per slot."""
    users, last = list(node.users), node
    for dim, layout in enumerate(sizes.dims(node)):
        if not sizes.changes(layout):
            continue
        kept = sizes.mask(layout).to(node.meta["val"].device)
        with node.graph.inserting_before(last.next):
            last = picked(last, dim, kept, f"{KEPT_ENTRIES}{node.name}_{dim}")
        sizes.layouts[last.name] = sizes.dims(node)
    for user in users:
        user.replace_input_with(node, last)


def picked(source: Node, dim: int, kept: Tensor, name: str) -> Node:
    """Select the ``kept`` positions (bool) of a dim by an index in a buffer of this name."""
    index = stored_index(source, kept.nonzero().flatten(), name)
    return source.graph.call_function(torch.ops.aten.index_select.default, (source, dim, index))


def stored_index(node: Node, index: Tensor, name: str) -> Node:
    """Register an index as a buffer of this name, and read it at the graph's insertion point."""
    module = node.graph.owning_module
    assert module is not None
    while hasattr(module, name):  # from an earlier export, which is cut again
        name += "_again"
    module.register_buffer(name, index)
    return node.graph.get_attr(name)


@rewrites("aten.unflatten")
def unflatten(sizes: Sizes, node: Node) -> None:
    """Correct the third argument, which lists the sizes that one dim is split into."""
    parts: Any = node.args[2]
    dim = int(node.args[1]) % len(sizes.dims(source(node)))  # type: ignore[arg-type]
    pairs = zip(parts, sizes.dims(node)[dim : dim + len(parts)], strict=True)
    node.update_arg(2, [sizes.fitted(node.graph, size, layout) for size, layout in pairs])


@rewrites(*SPLITS)
def split(sizes: Sizes, node: Node) -> None:
    """Give the sizes of all pieces, which may now differ."""
    pieces = sizes.layouts[node.name]
    dim = int(argument(node, 2, "dim", 0)) % len(pieces[0])
    if not any(sizes.changes(piece[dim]) for piece in pieces):
        return
    node.target = torch.ops.aten.split_with_sizes.default
    node.args = (source(node), [sizes.of(piece[dim]) for piece in pieces], dim)
    node.kwargs = {}


@rewrites(*SLICES)
def slice_(sizes: Sizes, node: Node) -> None:
    """Replace a range of positions by the range of the kept ones."""
    dims = sizes.dims(source(node))
    dim = int(argument(node, 1, "dim", 0)) % len(dims)
    layout, size = dims[dim], sizes.dims(node)[dim].size
    if not sizes.changes(layout) or size == layout.size:
        return
    start = argument(node, 2, "start", 0) or 0
    start += layout.size if start < 0 else 0
    step = int(argument(node, 4, "step", 1))
    is_narrow = operator_name(node.target) == "aten.narrow"
    step = 1 if is_narrow else step
    # With a step, each group of ``step`` neighbours is kept or cut as a whole.
    first = int(sizes.mask(layout)[: start - start % step].sum()) + start % step
    length = sizes.of(sizes.dims(node)[dim])
    end = length if is_narrow else first + (length - 1) * step + 1
    node.args = (source(node), dim, first, end, *node.args[4:])
    node.kwargs = {}


@rewrites(*(f"aten.conv{n}d" for n in (1, 2, 3)), *(f"aten.conv_transpose{n}d" for n in (1, 2, 3)))
def convolution(sizes: Sizes, node: Node) -> None:
    """Set the number of groups to that of the kept ones."""
    weight = node.args[1]
    assert isinstance(weight, Node)
    spatial = len(sizes.dims(weight)) - 2
    transposed = "transpose" in operator_name(node.target)
    whole = sizes.dims(node if transposed else source(node))[-spatial - 1]
    groups = sizes.of(whole) // sizes.of(sizes.dims(weight)[1])
    now = argument(node, 6, "groups", 1)
    if now == groups or isinstance(now, Node):  # as many as the batch has examples
        return
    if len(node.args) > 6:
        node.update_arg(6, groups)
    else:
        node.update_kwarg("groups", groups)


@rewrites("aten.rms_norm")
def rms_norm(sizes: Sizes, node: Node) -> None:
    """Compute ``x / √(Σx²/n + ε)`` from k of n positions: ``√(n/k) · x / √(Σx²/k + ε·n/k)``.

    An ε that is not given is that of the dtype, which the graph must not fix; then x is scaled
    by √(k/n) instead.
    """
    x, shape = source(node), node.args[1]
    over = sizes.dims(x)[-len(shape) :]  # type: ignore[arg-type]
    by = shrinkage(sizes, over)
    if by == 1:
        return
    weight, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    with node.graph.inserting_before(node):
        if eps is None:
            x = node.graph.call_function(torch.ops.aten.mul.Tensor, (x, by**-0.5))
        if weight is not None:
            weight = node.graph.call_function(torch.ops.aten.mul.Tensor, (weight, by**0.5))
    eps = None if eps is None else eps * by
    node.args = (x, [sizes.of(layout) for layout in over], weight, eps)
    node.kwargs = {}
    if weight is None:
        _scale_output(sizes, node, by**0.5)


@rewrites("aten.channel_shuffle")
def channel_shuffle(sizes: Sizes, node: Node) -> None:
    """Set the number of groups to that of the kept ones."""
    channels = sizes.dims(source(node))[1]
    node.update_arg(1, sizes.of(outer(channels, int(node.args[1]))))  # type: ignore[arg-type]


def group_norm(sizes: Sizes, node: Node) -> None:
    """Set the number of groups to that of the kept ones."""
    channels = sizes.dims(source(node))[1]
    groups: Any = node.args[1]
    node.update_arg(1, groups * sizes.of(channels) // channels.size)


def shrinkage(sizes: Sizes, dims: Sequence[Layout]) -> float:
    """Return the ratio of the number of positions of these dims before and after the cut."""
    return math.prod(dim.size for dim in dims) / math.prod(map(sizes.of, dims))


def _scale_output(sizes: Sizes, node: Node, by: float) -> None:
    """Multiply the node's output by a number, for all its users."""
    if by == 1:
        return
    with node.graph.inserting_after(node):
        scaled = node.graph.call_function(torch.ops.aten.mul.Tensor, (node, by))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    sizes.stands_for(scaled, node)


@rewrites("aten.scaled_dot_product_attention")
def attention(sizes: Sizes, node: Node) -> None:
    """Set the scale, which torch derives from the head's size, to that of the whole head."""
    head = sizes.dims(source(node))[-1]
    if sizes.changes(head) and argument(node, 6, "scale") is None:
        node.update_kwarg("scale", 1 / math.sqrt(head.size))
