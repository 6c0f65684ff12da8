"""Propagation of zeros through a graph: where gates must act to make closed slots read as zero."""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch.fx import Node

from l0prune.capture.compat import schema_of
from l0prune.infer.inference import Inference, Place, Read
from l0prune.infer.nodes import (
    IDENTITIES,
    PERMUTATIONS,
    argument,
    dim_order,
    dtype_of,
    is_pointwise,
    is_writer,
    may_view,
    operator_name,
    written,
)
from l0prune.infer.registry import ZEROS, Zero, failure, never, registered
from l0prune.infer.rules.pointwise import tried, zero_when_tried
from l0prune.infer.rules.reduction import TELLING, reduced_dims
from l0prune.infer.solver import Expr, Var, variables


class Zeros:
    """Zeros of a graph at a closed slot of ``var``, if ``places`` are gated.

    Where several dims of a node carry the variable, as those of a square weight, it may be zero at
    a closed slot of one of them and not of the other. ``reads`` are those of the variable.
    """

    def __init__(
        self, infer: Inference, var: Var, places: frozenset[Place], reads: Iterable[Read]
    ) -> None:
        self.infer = infer
        self.var = var
        self.places = places
        self.summed = {(o, read.node) for read in reads if not read.stays for o in read.operands}
        # value of a node at a closed slot, by dim; a dim is absent where the value varies
        self.numbers: dict[Node, dict[int, float]] = {}
        # nodes that are equal at all closed slots, with the zero nodes from which this follows
        self.alike: dict[Node, frozenset[Node]] = {}
        self.carrying: dict[Node, tuple[int, ...]] = {}

    def at(self, node: Node) -> bool | None:
        """Return whether the node is zero at closed slots; None without the variable."""
        return self._along(node, self.dims_of(node))

    def end_at(self, read: Read) -> bool:
        """Check that a closed slot adds exactly nothing there.

        It does where it is zero, or where the weight that reads it can be made zero: but zero times
        nan or infinity is nan.
        """
        dims = [(operand, self._summed_dims(read, operand)) for operand in read.operands]
        is_zero = [self._along(operand, of) is True for operand, of in dims]
        is_number = all(isfinite(self.numbers[o].get(d, 0.0)) for o, of in dims for d in of)
        has_known_zeros = self.known_zeros(read) is not None
        return is_number and (any(is_zero) or read.place is not None or has_known_zeros)

    def known_zeros(self, read: Read) -> frozenset[Node] | None:
        """Return the zero nodes from which closed slots' part of a sum or variance follows.

        Empty where the slots are zero, None where an export cannot compute that part.
        """
        if operator_name(read.node.target) not in TELLING or len(read.operands) != 1:
            return None
        (operand,) = read.operands
        if self.at(operand) is True:
            return frozenset()
        reduced = reduced_dims(argument(read.node, 1, "dim"), len(self.infer.dims(operand)))
        varying = [d for d in reduced if any(variables(self.infer.dims(operand)[d]))]
        return self.alike.get(operand) if len(varying) == 1 else None

    def sources(self, read: Read) -> Iterator[Place]:
        """Yield the parameters and buffers that keep operands of ``read`` from being zero."""
        pending = [(o, dim) for o in read.operands for dim in self._summed_dims(read, o)]
        seen = set(pending)
        while pending:
            node, dim = pending.pop()
            if self._along(node, [dim]):
                continue
            if node.op == "placeholder" and self.infer.can_be_gated(node):
                yield self.infer.captured.names[node.name], dim
            for operand in node.all_input_nodes:
                of = self._source_dims(operand, node, dim)
                new = [(operand, d) for d in (self.dims_of(operand) if of is None else of)]
                pending += [each for each in new if each not in seen]
                seen.update(new)

    def _along(self, node: Node, dims: Collection[int]) -> bool | None:
        """Return whether a node is zero at closed slots of all these dims; None without dims."""
        if not dims:
            return None
        self._follow(node)
        return all(self.numbers[node].get(dim) == 0 for dim in dims)

    def _follow(self, node: Node) -> None:
        """Find the numbers of a node, and of all nodes from which it is computed."""
        pending = [node]
        while pending:  # iterative: graphs are deeper than Python's stack
            top = pending[-1]
            missing = [n for n in top.all_input_nodes if n not in self.numbers]
            if missing and top not in self.numbers and self.dims_of(top):
                pending += missing
                continue
            if top not in self.numbers:
                self.numbers[top] = self._of(top)
            pending.pop()

    def _of(self, node: Node) -> dict[int, float]:
        dims = self.dims_of(node)
        if node.op == "placeholder":
            name = self.infer.captured.names.get(node.name, "")
            numbers = {dim: 0.0 for dim in dims if (name, dim) in self.places}
        elif not dims or self._is_overwritten(node):
            return {}
        else:
            found = {dim: self._number(node, dim) for dim in dims}
            numbers = {dim: number for dim, number in found.items() if number is not None}
        if dims and all(numbers.get(dim) == 0 for dim in dims):
            self.alike[node] = frozenset([node])
        elif len(dims) == 1 and node.op != "placeholder" and _is_slot_by_slot(node):
            self._follow_alike(node)
        return numbers

    def _follow_alike(self, node: Node) -> None:
        """Mark the node as equal at all closed slots if all its operands with slots are."""
        carrying = [operand for operand in node.all_input_nodes if self.dims_of(operand)]
        if carrying and all(operand in self.alike for operand in carrying):
            self.alike[node] = frozenset().union(*(self.alike[operand] for operand in carrying))

    def _number(self, node: Node, dim: int) -> float | None:
        """Return the node's constant value at a closed slot of a dim; None where it varies."""
        sources = {o: self._source_dims(o, node, dim) for o in node.all_input_nodes}
        states = [self._state(operand, dims) for operand, dims in sources.items()]
        numbers = {
            operand: self.numbers[operand][dims[0]]
            for operand, dims in sources.items()
            if dims and dims[0] in self.numbers[operand]
        }
        if zero_of(node) is zero_when_tried:
            return tried(node, numbers) if numbers else None
        if not all(map(isfinite, numbers.values())):
            return nan
        return _number_after(self.infer, node, numbers, states)

    def _state(self, operand: Node, dims: tuple[int, ...] | None) -> bool | None:
        """Return whether an operand is zero along dims; None if empty, False if unknown."""
        return False if dims is None else self._along(operand, dims)

    def _source_dims(self, operand: Node, node: Node, dim: int) -> tuple[int, ...] | None:
        """Return the operand's dims, at most one, with the slots of a dim of the node.

        Of W·x, with rows and columns of W on the same axis, the output has the rows' slots. None
        where the dim is unknown.
        """
        mine, theirs = self.dims_of(node), self.dims_of(operand)
        is_summed = (operand, node) in self.summed
        if not theirs or (is_summed and len(theirs) == 1):
            return ()
        carried = self.infer.carried.get((node, operand))
        if carried is not None and len(theirs) > 1:
            is_last = operand is not node.args[0]
            to = mine[-1 if is_last else 0]
            return (carried,) if dim == to and carried in theirs else ()
        if len(mine) == len(theirs) == 1:
            return theirs
        if is_summed:
            return None
        if operator_name(node.target) in PERMUTATIONS:
            return (dim_order(node, len(self.infer.dims(operand)))[dim],)
        rank, of = self._rank(node), self._rank(operand)
        if rank == of or is_pointwise(node.target):
            position = dim - (rank - of)
            return (position,) if position in theirs else ()
        return (theirs[mine.index(dim)],) if len(mine) == len(theirs) else None

    def _rank(self, node: Node) -> int:
        value = self.infer.values[node] or ()
        return len(value[0] if isinstance(value, list) else value)

    def _summed_dims(self, read: Read, operand: Node) -> list[int]:
        """Return the operand's dims with the variable, except the one that the result keeps."""
        carried = self.infer.carried.get((read.node, operand))
        return [dim for dim in self.dims_of(operand) if dim != carried]

    def _is_overwritten(self, node: Node) -> bool:
        """Check for a read after an in-place operator that does not keep the value's zeros.

        The result of the in-place operator is a separate node with separate numbers.
        """
        writers, readers, pending = [], [], [(node, True)]
        while pending:  # through all views of the same memory
            top, is_read = pending.pop()
            for user in top.users:
                writes = written(user) is top
                if writes and not self._keeps(user, top):
                    writers.append(user)
                if is_read:
                    readers.append(user)
                if writes or may_view(user):
                    pending.append((user, is_read and not writes))
        return any(writer < reader for writer in writers for reader in readers)

    def _keeps(self, writer: Node, written: Node) -> bool:
        """Check that an in-place operator keeps zeros for any values of its other operands."""
        operands = [True if each is written else None for each in writer.all_input_nodes]
        return zero_at(self.infer, writer, operands) is True

    def dims_of(self, node: Node) -> tuple[int, ...]:
        """The dims of a node (of one of its outputs) that carry the variable."""
        if node not in self.carrying:
            value = self.infer.values.get(node)
            every = value if isinstance(value, list) else [value or ()]
            found = [tuple(d for d, dim in enumerate(of) if self._carries(dim)) for of in every]
            self.carrying[node] = max(found, key=len, default=())
        return self.carrying[node]

    def _carries(self, dim: Expr) -> bool:
        return any(self.var is v for v in variables(self.infer.solver.resolve(dim)))


def _is_slot_by_slot(node: Node) -> bool:
    """Check that each slot of the result depends only on the same slots of the operands."""
    target: Any = node.target
    is_same = zero_of(node) is zero_when_tried or operator_name(target) in IDENTITIES
    tags, schema = getattr(target, "tags", ()), schema_of(target)
    is_random = torch.Tag.nondeterministic_seeded in tags
    return is_same and not is_random and schema is not None and not schema.is_mutable


def _viewed(node: Node) -> Node | None:
    """Return the operand of which the node is a view without writes; None if it is no view."""
    if is_writer(node) or not may_view(node):
        return None
    first = node.args[0]
    return first if isinstance(first, Node) else None


def zeroing(
    infer: Inference, var: Var, written: Collection[Place], reads: Collection[Read]
) -> tuple[list[Place], Zeros, Read | None]:
    """Find where gates have to act to make closed slots zero at ``reads`` without a weight.

    Gates on the weights that write the slots may not be enough: a class token, the positions or a
    norm's shift put values there, too. Those parameters are added where the reads need them, and
    buffers where parameters do not suffice.

    Returns the places, the zeros then, and the first read at which a slot cannot be zero.
    """
    places = list(dict.fromkeys(written))
    while True:
        zeros = Zeros(infer, var, frozenset(places), reads)
        missed = [read for read in reads if not zeros.end_at(read)]
        more = {place for read in missed for place in zeros.sources(read)}.difference(places)
        learned = {place for place in more if place[0] in infer.captured.parameters}
        new = sorted(learned or more)
        if not missed or not new:
            return places, zeros, missed[0] if missed else None
        places += new


def when_zero(
    infer: Inference, names: Collection[str], nodes: Iterable[Node]
) -> dict[Node, tuple[float, frozenset[str]]]:
    """Find the constant nodes where the named tensors are zero everywhere; 0/0 is nan.

    Returns:
        For each node with one value everywhere this value, nan where it is undefined or has no
        finite gradient, and the names from which it follows.
    """
    found: dict[Node, tuple[float, frozenset[str]]] = {}
    for node in nodes:
        if node.op == "placeholder":
            name = infer.captured.names.get(node.name, "")
            if name in names:
                found[node] = 0.0, frozenset([name])
            continue
        known = {operand: found[operand] for operand in node.all_input_nodes if operand in found}
        if node.op != "call_function" or not known:
            continue
        number = _number_of(
            infer, node, {operand: number for operand, (number, _) in known.items()}
        )
        if number is not None:
            found[node] = number, frozenset().union(*(of for _, of in known.values()))
    return found


def _number_of(infer: Inference, node: Node, numbers: Mapping[Node, float]) -> float | None:
    """Return the one value of a node at constant operands; None where it varies."""
    if zero_of(node) is zero_when_tried:
        return tried(node, numbers)
    if not all(map(isfinite, numbers.values())):
        return nan
    dtypes = ((operand, dtype_of(operand)) for operand in node.all_input_nodes)
    states = [
        numbers.get(operand) == 0 if dtype is not None and dtype.is_floating_point else None
        for operand, dtype in dtypes
    ]
    return _number_after(infer, node, numbers, states)


def _number_after(
    infer: Inference,
    node: Node,
    numbers: Mapping[Node, float],
    states: Sequence[bool | None],
) -> float | None:
    """Return a node's value by its zero rule, else the number of the operand that it views."""
    if is_zero := zero_at(infer, node, states):
        return 0.0 if is_zero is True else nan
    viewed = _viewed(node)
    return None if viewed is None else numbers.get(viewed)


def zero_at(infer: Inference, node: Node, operands: Sequence[bool | None]) -> bool | float:
    """Apply the zero rule of a node's operator; nan where the rule fails."""
    try:
        return zero_of(node)(node, operands)
    except Exception as error:
        infer.failed.setdefault(node, failure("zero rule", node, error))
        return nan


def zero_of(node: Node) -> Zero:
    """Return the zero rule of the operator of this node."""
    known = registered(operator_name(node.target))
    if known is not None:
        return ZEROS[known]
    return zero_when_tried if is_pointwise(node.target) else never
