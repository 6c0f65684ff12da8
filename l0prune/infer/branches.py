"""Branches of a captured graph: values that are joined to a stream and used nowhere else.

A branch can have a gate where the network without it is computed exactly; all nodes that only the
branch needs are removed with it. A branch that is added to a stream is exactly zero where a few
parameters are: the last ones before the sum, of a convolution and its bias, a norm, a scale. One
that is a part of concatenations is removed with all of its slots; every other dim must then still
have positions.
"""

from __future__ import annotations

from cmath import isfinite
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from torch.fx import Node

from l0prune.capture.provenance import module_of, without_call
from l0prune.infer.dataflow import (
    SUMS,
    Ending,
    Memory,
    is_concatenation,
    joined,
    macs_of,
    needs,
    region,
    shared_module,
    untaken,
)
from l0prune.infer.inference import Inference
from l0prune.infer.nodes import argument, dtype_of, has_tensor, operator_name, shape_of
from l0prune.infer.solver import Expr, Var, variables
from l0prune.infer.zero_flow import when_zero, zero_at
from l0prune.plan.branch import Branch, Needs, is_needed, shortest, vital
from l0prune.plan.layout import Cat, Const, Layouts, Pick, Prod, axes_of
from l0prune.plan.plan import Plan

_DEEPEST = 100  # operators between a branch's last parameters and its end


def added(
    infer: Inference, read: Mapping[Node, Needs], macs: Mapping[Node, float], taken: set[str]
) -> Iterator[Ending]:
    """Find the branches that are added to a stream, in the order of their sums.

    Their names are added to those that are ``taken``.
    """
    users, memory = _users_of_parameters(infer), Memory(infer.captured.graph)
    order = {node: number for number, node in enumerate(infer.captured.graph.nodes)}
    placeholders = infer.captured.graph.find_nodes(op="placeholder")
    for join in infer.captured.graph.nodes:
        candidates = [
            (sum(macs.get(node, 0) for node in found), end, found, tensors)
            for end in _operands(join)
            if (found := region(end, [join], read, memory))
            and (tensors := _Zeroing(infer, found, users).of(end))
            and _is_number(
                infer, tensors, end, [*placeholders, *sorted(found, key=order.__getitem__)]
            )
        ]
        if not candidates:
            continue
        # Of two the one with more work is the branch, and the other one the stream.
        work, end, found, tensors = max(candidates, key=lambda each: each[0])
        if work:
            owner = tensors[0].rpartition(".")[0] or tensors[0]
            name = untaken(shared_module(n for n in found if n in macs) or owner, taken)
            yield Ending(name, end, (join,), tuple(dict.fromkeys(tensors)))


def _is_number(infer: Inference, tensors: list[str], end: Node, nodes: list[Node]) -> bool:
    """Check that a branch is finite where these parameters are zero: no 0/0 of a spectral norm."""
    number, _ = when_zero(infer, tensors, nodes).get(end, (0.0, None))
    return isfinite(number)


def _operands(join: Node) -> Iterator[Node]:
    """Yield operands that may be a branch: without one the sum has the same shape and dtype."""
    if join.op != "call_function" or operator_name(join.target) not in SUMS:
        return
    first, second = join.args[:2]
    if isinstance(first, Node) and isinstance(second, Node) and first is not second:
        if _is_alike(first, join):
            yield second
        if _is_alike(second, join) and join.kwargs.get("alpha", 1) == 1:
            yield first


def _is_alike(operand: Node, join: Node) -> bool:
    return dtype_of(operand) == dtype_of(join) and shape_of(operand) == shape_of(join) is not None


def _users_of_parameters(infer: Inference) -> dict[str, set[Node]]:
    """Return the users of each parameter by its name, whichever of its names they read."""
    users: dict[str, set[Node]] = defaultdict(set)
    for node in infer.captured.graph.find_nodes(op="placeholder"):
        if infer.is_parameter(node):
            users[infer.captured.names[node.name]].update(node.users)
    return users


class _Zeroing:
    """Search for the parameters that make nodes of a region zero where they are zero."""

    def __init__(
        self, infer: Inference, region: frozenset[Node], users: dict[str, set[Node]]
    ) -> None:
        self._infer, self._region, self._users = infer, region, users
        self._known: dict[Node, list[str] | None] = {}

    def of(self, node: Node, deep: int = 0) -> list[str] | None:
        """Return the parameters that make the node zero where they are; None without any.

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
        alone = ({operand: names} for operand, names in own.items())
        for some in (both, *alone):
            if self._is_zero(node, some):
                return [name for names in some.values() for name in names]
        return None

    def _is_zero(self, node: Node, zeros: dict[Node, list[str]]) -> bool:
        """Check that the node is zero where these operands are, for any values of the others."""
        operands = node.all_input_nodes
        states = [o in zeros if has_tensor(o) else None for o in operands]
        return bool(zeros) and zero_at(self._infer, node, states) is True

    def _parameter(self, node: Node) -> str | None:
        """Return the name of a parameter that only the region reads, where a gate can act."""
        if node.op != "placeholder" or not self._infer.is_parameter(node):
            return None
        name = self._infer.captured.names[node.name]
        has_dims = bool(self._infer.tensors.get(name)) and name not in self._infer.unreached
        return name if has_dims and self._users[name] <= self._region else None


def side_by_side(
    infer: Inference,
    read: Mapping[Node, Needs],
    macs: Mapping[Node, float],
    gated: Collection[Var],
    taken: set[str],
) -> Iterator[Ending]:
    """Find the branches that are parts of concatenations, the one with most work first."""
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
    """Return the module of this work, or its child with the last work if it has the join, too."""
    shared = shared_module(works)
    if shared not in (module_of(join), ""):
        return shared
    depth = len(shared.split(".")) if shared else 0
    return ".".join(module_of(works[-1]).split(".")[: depth + 1])


def _takes(join: Node, end: Node) -> bool:
    """Check for a concatenation that takes ``end`` once and keeps its dtype without it."""
    if not is_concatenation(join) or len(join.all_input_nodes) < 2:
        return False
    parts = joined(join)
    dtypes = {dtype_of(part) for part in parts if part is not end}
    return parts.count(end) == 1 and (shape_of(end) or [0]) != [0] and dtypes == {dtype_of(join)}


def _axes(infer: Inference, end: Node, join: Node) -> tuple[Var, ...]:
    """Return the variables of the concatenated dim; empty if it has other parts, too."""
    dims = infer.dims(end)
    expr = infer.solver.resolve(dims[int(argument(join, 1, "dim", 0)) % len(dims)])
    parts = expr.parts if isinstance(expr, Cat) else (expr,)
    axes = tuple(dict.fromkeys(part for part in parts if isinstance(part, Var)))
    return axes if len(axes) == len(parts) else ()


class _Left:
    """Checks that the dims of a graph keep positions when branches are removed."""

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
        """Check that dims outside of the region have positions without these axes; record it."""
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
        """Check that a dim has positions whichever branches that it is not in are removed."""
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
                return False  # whether the picked positions are kept is not checked
        raise AssertionError(expr)


def _is_within(node: Node, region: Collection[Node]) -> bool:
    """Check whether a node is computed for the region alone, or a parameter that only it reads."""
    if node.op == "placeholder":
        return bool(node.users) and all(user in region for user in node.users)
    return node in region


_MOST = 6  # most sets of branches under which one tensor is needed


@dataclass(frozen=True)
class Branches:
    """The branches of a graph.

    Attributes:
        endings: where they end.
        needs: of each node, the sets of branches under which it is needed.
        parameters: the same of each parameter, under any of its names.
    """

    endings: tuple[Ending, ...] = ()
    needs: Mapping[Node, Needs] = field(default_factory=dict)
    parameters: Mapping[str, Needs] = field(default_factory=dict)

    def modules(self, name: str) -> tuple[str, ...]:
        """Return the modules whose calls, without submodules, only this branch needs, by path."""
        return tuple(self._modules[name])

    def tensors(self, name: str) -> tuple[str, ...]:
        """Return the names of the parameters that only this branch needs."""
        return tuple(self._tensors[name])

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        needs: dict[str, list[Needs]] = defaultdict(list)
        for node, of in self.needs.items():
            if node.op == "call_function" and of:
                needs[without_call(module_of(node))].append(of)
        return _by_branch({path: chain(*each) for path, each in needs.items() if path})

    @cached_property
    def _tensors(self) -> dict[str, list[str]]:
        return _by_branch(self.parameters)

    def dead(self, gone: Collection[str]) -> set[Node]:
        """Return the calls that are needed with all branches and not without these."""
        calls = ((node, of) for node, of in self.needs.items() if node.op == "call_function")
        return {node for node, of in calls if of and not is_needed(of, gone)}


def branches(infer: Inference, axes: Collection[Var], taken: Sequence[str]) -> Branches:
    """Find the branches of an inferred graph; ``axes`` are the variables that may be cut."""
    read, macs, names = _needs(infer, ()), macs_of(infer), set(taken)
    endings = [*added(infer, read, macs, names), *side_by_side(infer, read, macs, axes, names)]
    while True:
        of_nodes = _needs(infer, endings)
        # Sizes, which many branches may use, cost nothing.
        tensors = (of for node, of in of_nodes.items() if has_tensor(node))
        hungry = next((of for of in tensors if len(of) > _MOST), None)
        if hungry is None:
            return Branches(tuple(endings), of_nodes, _of_parameters(infer, of_nodes))
        # Without a switch on the last branch that it feeds, it is needed under fewer sets.
        fed = [each for each in endings if any(each.name in some for some in hungry)]
        endings.remove(fed[-1])


def _by_branch(needs: Mapping[str, Iterable[frozenset[str]]]) -> dict[str, list[str]]:
    """Return by branch the names of the entries that only this branch needs."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, of in needs.items():
        for branch in vital(of):
            found[branch].append(name)
    return found


def _needs(infer: Inference, endings: Sequence[Ending]) -> dict[Node, Needs]:
    names = {(each.end, join): each.name for each in endings for join in each.joins}
    return needs(infer.captured.graph, lambda node, user: names.get((node, user)))


def _of_parameters(infer: Inference, of_nodes: Mapping[Node, Needs]) -> dict[str, Needs]:
    found: dict[str, Needs] = {}
    for node in infer.captured.graph.find_nodes(op="placeholder"):
        if infer.is_parameter(node):
            name = infer.captured.names[node.name]
            found[name] = shortest((*found.get(name, ()), *of_nodes[node]))
    return found


def closing(plan: Plan) -> Iterator[Branch]:
    """Yield the branches of a plan, each with its closing axes.

    These are axes that only the branch needs, each of which makes it zero once all its slots are
    closed: its part of a concatenation, or an axis that all parameters at its end have. A bias
    among these would still be added.
    """
    users: dict[int, list[frozenset[str]]] = defaultdict(list)  # by axis, when it is needed
    for cost in plan.costs:
        for number in _axes_of(cost.dims):
            users[number] += map(frozenset, cost.needed)
    only = {number: vital(needed) for number, needed in users.items()}
    for branch in plan.branches:
        yield replace(branch, closing=tuple(_of(plan, branch, only)))


def _of(plan: Plan, branch: Branch, only: Mapping[int, frozenset[str]]) -> Iterator[str]:
    if not branch.tensors:
        yield from branch.axes if len(branch.axes) == 1 else ()
        return
    tensors = [plan.tensors[name] for name in branch.tensors]
    shared = frozenset.intersection(*map(_axes_of, tensors))
    for number in sorted(shared):
        axis = plan.axes[number]
        if branch.name in only.get(number, ()) and _ends(plan, number, tensors):
            yield from () if axis.keeps_one else (axis.name,)


def _ends(plan: Plan, number: int, tensors: Collection[Layouts]) -> bool:
    """Check that all of these tensors are empty without this axis."""
    left = torch.ones(plan.size, dtype=torch.bool)
    left[plan.axes[number].slice] = False
    return all(any(not plan.mask(dim, left).any() for dim in dims) for dims in tensors)


def _axes_of(dims: Layouts) -> frozenset[int]:
    return frozenset().union(*map(axes_of, dims))
