"""Dataflow of a captured graph: shared memory, lifetimes of values, and needed nodes.

A node is needed if any of its users is, or any later reader of what it writes in place. The join
in which a branch ends needs it only while the branch is present.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from math import prod

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node

from l0prune.capture.compat import memory_of, schema_of
from l0prune.capture.provenance import module_of
from l0prune.infer.inference import Inference
from l0prune.infer.nodes import (
    CONCATENATIONS,
    argument,
    draws,
    hint,
    is_assertion,
    is_writer,
    may_view,
    operator_name,
    written,
)
from l0prune.infer.solver import Expr, Var
from l0prune.plan.activations import Activation
from l0prune.plan.branch import ALWAYS, Needs, shortest
from l0prune.plan.layout import Const, Layout, Layouts, axes_of


@dataclass
class _Storage:
    """Memory that a node fills, and that views of it share."""

    node: Node
    tensor: Tensor
    dims: tuple[Expr, ...]
    made: int
    last: int


def activations(infer: Inference, layout: Callable[[Expr], Layout]) -> Iterator[Activation]:
    """Yield the values that an inferred graph computes, in order.

    Stored tensors are not among them. Values that shared memory on the example count as one.
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
    """Yield the node's tensors, each with a key that identifies its memory."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    for number, tensor in enumerate(each for each in values if isinstance(each, Tensor)):
        key: Hashable = (node.name, number)
        with suppress(
            NotImplementedError
        ):  # sparse ones, and those inside of torch.func, have none
            key = memory_of(tensor)
        yield key, tensor


def _dims(infer: Inference, node: Node, number: int, tensor: Tensor) -> tuple[Expr, ...]:
    """One expression per dim of one of the node's tensors."""
    value = infer.values.get(node)
    of = value[number : number + 1] if isinstance(value, list) else [value]
    if of and of[0] is not None and len(of[0]) == tensor.dim():
        return of[0]
    return tuple(Const(hint(size)) for size in tensor.shape)


def folded(scale: float, dims: Layouts) -> tuple[float, Layouts]:
    """Fold the constant dims of a product into its scale; return it and the other dims."""
    for dim in dims:
        if not axes_of(dim):
            scale *= dim.size
    return scale, tuple(dim for dim in dims if axes_of(dim))


class Memory:
    """Memory of a captured graph: which values share it, who writes and who reads.

    A view shares the memory of its source, and so does the result of an in-place operator, or of
    a dropout that is off: the operators' schemas and the example's tensors say so.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self._base: dict[Node, Node] = {}
        self._values: dict[Node, list[Node]] = defaultdict(list)  # by base
        self._writers: dict[Node, list[Node]] = defaultdict(list)
        self._readers: dict[Node, frozenset[Node]] = {}
        self._first: dict[Hashable, Node] = {}  # by memory, the base of what lies there
        for node in graph.nodes:
            base = self._base[node] = self._found(node)
            self._values[base].append(node)
            target = written(node)
            if target is not None:
                self._writers[self._base[target]].append(node)

    def _found(self, node: Node) -> Node:
        of = node.args[0] if node.args else None
        is_one = node.target is operator.getitem and isinstance(of, Node) and may_view(of)
        is_view = node.op == "call_function" and (is_one or may_view(node))
        base = self._base[of] if is_view and isinstance(of, Node) else node
        keys = [key for key, _ in _tensors(node)]
        return self._first.setdefault(keys[0], base) if len(keys) == 1 else base

    def base(self, node: Node) -> Node:
        """Return the value whose memory the node's value may share; else the node itself."""
        return self._base[node]

    def writers(self, node: Node) -> list[Node]:
        """Return the nodes that write in place into the memory of the node's value."""
        return self._writers[self._base[node]]

    def writes_before(self, node: Node, reader: Node) -> list[Node]:
        """Return the writes into the memory of the node's value before ``reader``, in order."""
        return [w for w in self.writers(node) if self._order[w] < self._order[reader]]

    def readers(self, node: Node) -> frozenset[Node]:
        """Return the node's users; for an in-place write also later readers of that memory."""
        if node not in self._readers:
            found, target = set(node.users), written(node)
            if target is not None:
                users = (user for value in self._values[self._base[target]] for user in value.users)
                found.update(user for user in users if self._order[user] > self._order[node])
            self._readers[node] = frozenset(found)
        return self._readers[node]

    def sources(self, node: Node) -> Iterator[Node]:
        """Yield the operands of a node, and the earlier writes into their memory."""
        for value in node.all_input_nodes:
            yield value
            yield from self.writes_before(value, node)


_OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_")


def carried(graph: Graph, stored: Collection[Node]) -> list[Node]:
    """Return those stored tensors that carry values from one call to the next.

    The graph writes into them, and its outputs, or others of them, need what was there before. A
    tensor that is overwritten as a whole before it is read carries nothing.
    """
    memory, found = Memory(graph), list[Node]()
    end = graph.output_node()
    pending, seen = [(value, end) for value in end.all_input_nodes], set[tuple[Node, Node]]()
    while pending:
        value, reader = pending.pop()
        if (value, reader) in seen:
            continue
        seen.add((value, reader))
        base, writes = memory.base(value), memory.writes_before(value, reader)
        whole = [n for n, each in enumerate(writes) if _overwrites(each, base)]
        for each in writes[whole[-1] if whole else 0 :]:
            operands = each.all_input_nodes
            pending += [(o, each) for o in operands if o is not base or not _overwrites(each, base)]
        if whole:
            continue
        pending += [(operand, base) for operand in base.all_input_nodes]
        if base in stored and memory.writers(base) and base not in found:
            found.append(base)
            pending.append((base, end))
    return found


def _overwrites(node: Node, base: Node) -> bool:
    """Return whether a node overwrites all of a tensor with values from elsewhere."""
    return node.args[0] is base and operator_name(node.target) in _OVERWRITES


def drop_unneeded(graph: Graph) -> None:
    """Remove the calls whose results and writes no output, buffer or input needs.

    torch's own elimination keeps every write and all operators that may draw random numbers, with
    attention among them. Here a draw stays where a later one would give other numbers without it,
    and an assertion of sizes where the tensors do that it measures.
    """
    memory, needed, is_drawn_later = Memory(graph), set[Node](), False
    told = _assertions_of_sizes(graph)
    for node in reversed(graph.nodes):
        has_effect = node not in told and _has_effect(node, memory)
        is_needed = has_effect or (is_drawn_later and draws(node))
        if is_needed or not needed.isdisjoint(memory.readers(node)):
            needed.add(node)
            is_drawn_later |= draws(node)
    stays = set(needed)
    for node in graph.nodes:
        if (node in told or _is_number(node)) and stays.issuperset(node.all_input_nodes):
            stays.add(node)
    for node in reversed(graph.nodes):
        is_told = node in stays and (node in told or bool(node.users))
        if node not in needed and not is_told:
            graph.erase_node(node)


_MEASURES = ("aten.sym_size", "aten.sym_numel", "aten.sym_stride", "aten.sym_storage_offset")


def _assertions_of_sizes(graph: Graph) -> set[Node]:
    """Return the assertions that read no values of tensors."""
    of_values, found = set[Node](), set[Node]()
    for node in graph.nodes:
        reads_values = not of_values.isdisjoint(node.all_input_nodes)
        if is_assertion(node) and not reads_values:
            found.add(node)
        elif _is_number(node) and operator_name(node.target) not in _MEASURES:
            reads_tensors = any(not _is_number(each) for each in node.all_input_nodes)
            if reads_values or reads_tensors:
                of_values.add(node)
    return found


def _is_number(node: Node) -> bool:
    """Check whether a call computes a number, of sizes or of a tensor's value."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, (*_SYMBOLIC, int, float))


_SYMBOLIC = (SymInt, SymFloat, SymBool)


def _has_effect(node: Node, memory: Memory) -> bool:
    """Check for an output, an assertion of values, or a write into more than a computed value."""
    if not is_writer(node):
        return bool(node.is_impure(impure_random=False))
    aliases = [each.alias_info for each in schema_of(node.target).arguments]
    places = [number for number, alias in enumerate(aliases) if alias and alias.is_write]
    target = written(node) if places == [0] else None
    return target is None or memory.base(target).op != "call_function"


def region(
    end: Node, joins: Collection[Node], read: Mapping[Node, Needs], memory: Memory
) -> frozenset[Node]:
    """Return the nodes that only these joins need; empty where ``end`` has other readers.

    ``read`` is empty for nodes that reach no output, such as assertions.
    """
    joined = {user for user in memory.readers(end) if read[user]}
    if end.op != "call_function" or joined != set(joins):
        return frozenset()
    found, pending = {end}, list(memory.sources(end))
    while pending:
        node = pending.pop()
        if node in found or node.op != "call_function":
            continue
        readers = memory.readers(node)
        if not readers <= found and any(read[user] for user in readers - found):
            continue
        found.add(node)
        pending += memory.sources(node)
    writes = any(is_writer(node) and memory.base(node) not in found for node in found)
    return frozenset() if writes else frozenset(found)


def macs_of(infer: Inference) -> dict[Node, float]:
    """Multiply-accumulates of each node that does work, for one example."""
    found: dict[Node, float] = defaultdict(float)
    for work in infer.works:
        sizes = [dim.size for dim in work.dims]
        sizes += [infer.tensors[name][number].size for name, number in work.places]
        found[work.node] += work.scale * prod(sizes)
    return found


def shared_module(nodes: Iterable[Node]) -> str:
    """Return the longest common path of the modules of these nodes."""
    paths = [module_of(node).split(".") for node in nodes]
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False))
    return ".".join(words[0] for words in shared)


def untaken(name: str, taken: set[str]) -> str:
    """Return the name, or a variant that is not taken, and add it to ``taken``."""
    name = f"{name}.branch" if name in taken else name
    found = next(n for i in count(1) if (n := name if i == 1 else f"{name}#{i}") not in taken)
    taken.add(found)
    return found


SUMS = ("aten.add", "aten.add_")


@dataclass(frozen=True)
class Ending:
    """The end of a branch, and the sums or concatenations that take it.

    Attributes:
        name: of the branch.
        end: the node with the branch's result.
        joins: the one sum, or the concatenations, that take it.
        tensors: parameters that make the branch zero where they are; empty for concatenations.
        axes: variables without whose slots the branch has size 0; empty for a sum.
    """

    name: str
    end: Node
    joins: tuple[Node, ...]
    tensors: tuple[str, ...] = ()
    axes: tuple[Var, ...] = ()


def is_concatenation(node: Node) -> bool:
    """Check for a concatenation."""
    return node.op == "call_function" and operator_name(node.target) in CONCATENATIONS


def joined(join: Node) -> list[Node]:
    """Return the operands of a sum or a concatenation."""
    parts = argument(join, 0, "tensors") if is_concatenation(join) else join.args[:2]
    return [part for part in parts if isinstance(part, Node)]


def needs(graph: Graph, branch_of: Callable[[Node, Node], str | None]) -> dict[Node, Needs]:
    """Return for each node of a graph the branches under which it is needed.

    ``branch_of(node, user)`` is the name of the branch that ends there, if one does. A write into
    a buffer is needed always, and so is an assertion of values, as ``drop_unneeded`` keeps both.
    """
    found: dict[Node, Needs] = {}
    memory, told, later = Memory(graph), _assertions_of_sizes(graph), set[frozenset[str]]()
    for node in reversed(graph.nodes):
        if node.op != "placeholder" and node not in told and _has_effect(node, memory):
            found[node] = ALWAYS
            continue
        wanted = {
            each | _named(branch_of(node, user))
            for user in memory.readers(node)
            for each in found[user]
        }
        if draws(node):
            wanted |= later
            later |= wanted
        found[node] = shortest(wanted)
    return found


def _named(branch: str | None) -> frozenset[str]:
    return frozenset() if branch is None else frozenset([branch])
