"""Branches that are one part of concatenations.

Such a one is gone with all of its slots. What reads the concatenation has a part less then, which
is exact wherever single slots are; but no dim that is left may be without any positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from l0prune.capture.provenance import module_of
from l0prune.infer.ending import Ending, is_concatenation, joined
from l0prune.infer.expressions import Cat, Const, Expr, Pick, Prod, Var, variables
from l0prune.infer.inference import Inference
from l0prune.infer.memory import Memory
from l0prune.infer.nodes import argument, dtype_of, shape_of
from l0prune.infer.regions import region, shared_module, untaken
from l0prune.plan.needs import Needs


def side_by_side(
    infer: Inference,
    read: Mapping[Node, Needs],
    macs: Mapping[Node, float],
    gated: Collection[Var],
    taken: set[str],
) -> Iterator[Ending]:
    """Those of a graph that inference has been through, the one with most work first.

    Args:
        infer: that.
        read: of each node whether any output needs it.
        macs: of each node that does work.
        gated: the variables that are axes.
        taken: names that are taken already; theirs are added.
    """
    left, memory = _Left(infer), Memory(infer.captured.graph)
    candidates: list[tuple[float, Ending, frozenset[Node]]] = []
    for end in infer.captured.graph.nodes:
        joins = tuple(user for user in end.users if read[user])
        if not joins or not all(_takes(join, end) for join in joins):
            continue
        found, axes = region(end, joins, read, memory), _axes(infer, end, joins[0])
        works = sorted(found.intersection(macs))
        if works and axes and all(var in gated for var in axes):
            ending = Ending(_name(works, joins[0]), end, joins, axes=axes)
            candidates.append((sum(map(macs.__getitem__, works)), ending, found))
    for _, ending, found in sorted(candidates, key=lambda each: -each[0]):
        if left.is_some_without(ending.axes, found):
            yield replace(ending, name=untaken(ending.name, taken))


def _name(works: Sequence[Node], join: Node) -> str:
    """The module that does this work, or its last one if that module does more than this."""
    shared = shared_module(works)
    if shared not in (module_of(join), ""):
        return shared
    depth = len(shared.split(".")) if shared else 0
    return ".".join(module_of(works[-1]).split(".")[: depth + 1])


def _takes(join: Node, end: Node) -> bool:
    """Is the join a concatenation of several, this one once, that is of the same dtype without?"""
    if not is_concatenation(join) or len(join.all_input_nodes) < 2:
        return False
    parts = joined(join)
    dtypes = {dtype_of(part) for part in parts if part is not end}
    return parts.count(end) == 1 and (shape_of(end) or [0]) != [0] and dtypes == {dtype_of(join)}


def _axes(infer: Inference, end: Node, join: Node) -> tuple[Var, ...]:
    """All the variables of the dim that is put beside others; none if it holds aught else."""
    dims = infer.dims(end)
    expr = infer.solver.resolve(dims[int(argument(join, 1, "dim", 0)) % len(dims)])
    parts = expr.parts if isinstance(expr, Cat) else (expr,)
    axes = tuple(dict.fromkeys(part for part in parts if isinstance(part, Var)))
    return axes if len(axes) == len(parts) else ()


class _Left:
    """What is left of the dims of a graph without branches."""

    def __init__(self, infer: Inference) -> None:
        self._infer = infer
        self._dims: dict[Node, list[tuple[Expr, frozenset[Var]]]] = {}
        self._nodes: dict[Var, list[Node]] = defaultdict(list)
        for node, value in infer.values.items():
            many = value if isinstance(value, list) else [value or ()]
            exprs = [infer.solver.resolve(dim) for dims in many for dim in dims]
            self._dims[node] = [(expr, frozenset(variables(expr))) for expr in exprs]
            for var in frozenset().union(*(found for _, found in self._dims[node])):
                self._nodes[var].append(node)
        self._without: dict[Var, list[frozenset[Node]]] = defaultdict(list)

    def is_some_without(self, axes: Collection[Var], region: frozenset[Node]) -> bool:
        """Has every dim outside of the region positions without these axes? If so, they may go."""
        for var in axes:
            self._without[var].append(region)
        nodes = {node for var in axes for node in self._nodes[var]}
        is_some = all(
            self._is_some(expr, node)
            for node in nodes
            if not _is_within(node, region)
            for expr, found in self._dims[node]
            if not found.isdisjoint(axes)
        )
        if not is_some:
            for var in axes:
                self._without[var].pop()
        return is_some

    def _is_some(self, expr: Expr, node: Node) -> bool:
        """Has a dim of a node positions, whatever branches are gone that it is no part of?"""
        match expr:
            case Const(size):
                return size > 0
            case Var():
                return all(_is_within(node, region) for region in self._without[expr])
            case Cat(parts):
                return any(self._is_some(part, node) for part in parts)
            case Prod(factors):
                return all(self._is_some(factor, node) for factor in factors)
            case Pick():
                return False  # whether those that it picks are left is not looked into
        raise AssertionError(expr)


def _is_within(node: Node, region: Collection[Node]) -> bool:
    """Is it computed for the region alone, or a parameter that only it reads?"""
    if node.op == "placeholder":
        return bool(node.users) and all(user in region for user in node.users)
    return node in region
