"""Branches of a captured graph: what is added to a stream, and computed for that alone.

A branch may have a gate of its own where it is exactly zero once a few parameters are: the last
ones before the sum, of a convolution and its bias, a norm, a scale. Then the sum is its other
operand, and all that only the branch needs can go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, takewhile
from math import prod

from torch import Tensor
from torch.fx import Node

from l0prune.capture.provenance import module_of
from l0prune.infer.inference import Inference
from l0prune.infer.liveness import needs
from l0prune.infer.nodes import has_tensor, is_writer, operator_name, shape_of, written
from l0prune.infer.zero_flow import zero_of
from l0prune.plan.needs import Needs, is_needed, shortest

_SUMS = ("aten.add", "aten.add_")
_MOST = 6  # ways in which one node may be needed
_DEEPEST = 100  # operators between a branch's last parameters and its end


@dataclass(frozen=True)
class Ending:
    """Where a branch ends.

    Attributes:
        name: of the branch.
        join: the sum.
        end: the operand that is the branch.
        stays: its other operand.
        tensors: parameters for which the branch is zero where they are.
    """

    name: str
    join: Node
    end: Node
    stays: Node
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Branches:
    """Those of a graph.

    Attributes:
        endings: in the order of their sums.
        needs: of each node, which of them have to be there for it to be needed.
        parameters: the same of each parameter, under whichever of its names it is read.
    """

    endings: tuple[Ending, ...] = ()
    needs: Mapping[Node, Needs] = field(default_factory=dict)
    parameters: Mapping[str, Needs] = field(default_factory=dict)

    def modules(self, name: str) -> tuple[str, ...]:
        """Paths of the modules of whose own work nothing is needed without this branch."""
        return tuple(
            path
            for path, of in self._needs_of_modules.items()
            if path and not any(is_needed(each, [name]) for each in of)
        )

    @cached_property
    def _needs_of_modules(self) -> dict[str, list[Needs]]:
        found: dict[str, list[Needs]] = defaultdict(list)
        for node, of in self.needs.items():
            if node.op == "call_function" and of:
                found[module_of(node)].append(of)
        return found

    def dead(self, gone: Collection[str]) -> set[Node]:
        """What is needed with all branches and not without these."""
        calls = ((node, of) for node, of in self.needs.items() if node.op == "call_function")
        return {node for node, of in calls if of and not is_needed(of, gone)}


def branches(infer: Inference, taken: Sequence[str]) -> Branches:
    """Those of a graph that inference has been through.

    Args:
        infer: that.
        taken: names that are taken already.
    """
    endings = list(_endings(infer, taken))
    while True:
        of_nodes = _needs(infer, endings)
        hungry = next((of for of in of_nodes.values() if len(of) > _MOST), None)
        if hungry is None:
            return Branches(tuple(endings), of_nodes, _of_parameters(infer, of_nodes))
        # Without a switch on the last one that it is for, it is needed more often.
        names = [ending.name for ending in endings if any(ending.name in each for each in hungry)]
        endings = [ending for ending in endings if ending.name != names[-1]]


def _needs(infer: Inference, endings: Sequence[Ending]) -> dict[Node, Needs]:
    names = {(ending.end, ending.join): ending.name for ending in endings}
    return needs(infer.captured.graph, lambda node, user: names.get((node, user)))


def _of_parameters(infer: Inference, of_nodes: Mapping[Node, Needs]) -> dict[str, Needs]:
    found: dict[str, Needs] = {}
    for node in infer.captured.graph.find_nodes(op="placeholder"):
        if infer.is_parameter(node):
            name = infer.captured.names[node.name]
            found[name] = shortest((*found.get(name, ()), *of_nodes[node]))
    return found


def _endings(infer: Inference, taken: Sequence[str]) -> Iterator[Ending]:
    users = _users_of_parameters(infer)
    read = _needs(infer, ())
    macs_of = _macs(infer)
    names = set(taken)
    for join in infer.captured.graph.nodes:
        candidates = [
            (sum(macs_of.get(node, 0) for node in region), end, stays, region, tensors)
            for end, stays in _operands(join)
            if (region := _region(end, join, read)) is not None
            and (tensors := _Zeroing(infer, region, users).of(end))
        ]
        if not candidates:
            continue
        # Of two the one with more work is the branch, and the other one the stream.
        macs, end, stays, region, tensors = max(candidates, key=lambda each: each[0])
        if macs:
            name = _unique(_name((node for node in region if node in macs_of), tensors), names)
            yield Ending(name, join, end, stays, tuple(dict.fromkeys(tensors)))


def _operands(join: Node) -> Iterator[tuple[Node, Node]]:
    """What may be a branch, and what the sum is without it: a tensor of its own shape and dtype."""
    if join.op != "call_function" or operator_name(join.target) not in _SUMS:
        return
    first, second = join.args[:2]
    if isinstance(first, Node) and isinstance(second, Node) and first is not second:
        if _is_alike(first, join):
            yield second, first
        if _is_alike(second, join) and join.kwargs.get("alpha", 1) == 1:
            yield first, second


def _is_alike(operand: Node, join: Node) -> bool:
    values = operand.meta.get("val"), join.meta.get("val")
    dtypes = [each.dtype if isinstance(each, Tensor) else None for each in values]
    return dtypes[0] == dtypes[1] and shape_of(operand) == shape_of(join) is not None


def _region(end: Node, join: Node, read: Mapping[Node, Needs]) -> frozenset[Node] | None:
    """The nodes whose results reach nothing but the sum; None where that is not so of the end.

    ``read`` is empty for nodes that reach no output, such as what only asserts.
    """

    def users(node: Node) -> set[Node]:
        return {user for user in node.users if read[user]}

    if end.op != "call_function" or users(end) != {join}:
        return None
    region, pending = {end}, list(end.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in region or node.op != "call_function" or not users(node) <= region:
            continue
        region.add(node)
        pending += node.all_input_nodes
    return None if any(_writes_elsewhere(node, region) for node in region) else frozenset(region)


def _writes_elsewhere(node: Node, region: set[Node]) -> bool:
    """Does it write into something that others may read?"""
    return is_writer(node) and written(node) not in region


def _macs(infer: Inference) -> dict[Node, float]:
    """Multiply-accumulates of each node that does work, for one example."""
    found: dict[Node, float] = defaultdict(float)
    for work in infer.works:
        sizes = [dim.size for dim in work.dims]
        sizes += [infer.tensors[name][number].size for name, number in work.places]
        found[work.node] += work.scale * prod(sizes)
    return found


def _users_of_parameters(infer: Inference) -> dict[str, set[Node]]:
    """By name of a parameter, all that reads it, under whichever of its names."""
    users: dict[str, set[Node]] = defaultdict(set)
    for node in infer.captured.graph.find_nodes(op="placeholder"):
        if infer.is_parameter(node):
            users[infer.captured.names[node.name]].update(node.users)
    return users


class _Zeroing:
    """Which parameters make the nodes of a region zero, by what the operators do to zeros."""

    def __init__(
        self, infer: Inference, region: frozenset[Node], users: dict[str, set[Node]]
    ) -> None:
        self._infer, self._region, self._users = infer, region, users
        self._known: dict[Node, list[str] | None] = {}

    def of(self, node: Node, deep: int = 0) -> list[str] | None:
        """The parameters; None where there are none that do.

        Those that the operator itself reads come first: they are the last ones of the branch.
        """
        if node not in self._known and deep < _DEEPEST:
            self._known[node] = self._found(node, deep + 1)
        return self._known.get(node)

    def _found(self, node: Node, deep: int) -> list[str] | None:
        operands = node.all_input_nodes
        own = {o: [name] for o in operands if (name := self._parameter(o)) is not None}
        if self._is_zero(node, own):
            return [name for names in own.values() for name in names]
        computed: dict[Node, list[str]] = {}
        for operand in operands:
            tensors = self.of(operand, deep) if operand in self._region else None
            if tensors:
                computed[operand] = tensors
                for some in ({**own, operand: tensors}, {operand: tensors}):
                    if self._is_zero(node, some):
                        return [name for names in some.values() for name in names]
        both = {**own, **computed}
        if self._is_zero(node, both):
            return [name for names in both.values() for name in names]
        return None

    def _is_zero(self, node: Node, zeros: dict[Node, list[str]]) -> bool:
        """Is the node zero where these operands are, whatever the other tensors are?"""
        operands = node.all_input_nodes
        states = [o in zeros if has_tensor(o) else None for o in operands]
        return bool(zeros) and zero_of(node)(node, states) is True

    def _parameter(self, node: Node) -> str | None:
        """The name of a parameter with a dim that only the region reads."""
        if node.op != "placeholder" or not self._infer.is_parameter(node):
            return None
        name = self._infer.captured.names[node.name]
        has_dims = bool(self._infer.tensors.get(name))
        return name if has_dims and self._users[name] <= self._region else None


def _name(nodes: Iterable[Node], tensors: Sequence[str]) -> str:
    """What the names of the modules begin with in which these nodes are, by whole words.

    Where they have nothing in common, the module that ends the branch.
    """
    paths = [module_of(node).split(".") for node in nodes]
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False))
    return ".".join(words[0] for words in shared) or tensors[0].rpartition(".")[0] or tensors[0]


def _unique(name: str, taken: set[str]) -> str:
    """The name, or one like it that is not taken; it is taken then."""
    if name in taken:
        name = f"{name}.branch"
    found = next(n for i in count(1) if (n := name if i == 1 else f"{name}#{i}") not in taken)
    taken.add(found)
    return found
