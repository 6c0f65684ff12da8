"""Is a slot exactly zero where it is read, once its writers are multiplied by zero?"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Collection, Iterable, Iterator
from math import nan
from typing import Any

import torch
from torch.fx import Node

from l0prune.capture.compat import schema_of
from l0prune.infer.expressions import Expr, Var, variables
from l0prune.infer.inference import Inference, Place, Read
from l0prune.infer.nodes import (
    IDENTITIES,
    argument,
    is_pointwise,
    is_writer,
    may_view,
    operator_name,
    written,
)
from l0prune.infer.registry import ZEROS, Zero, never, registered
from l0prune.infer.rules.pointwise import tried, zero_when_tried
from l0prune.infer.rules.reduction import TELLING, reduced_dims


class Zeros:
    """Which nodes are zero at a slot of ``var`` that is closed, if ``places`` are gated.

    ``reads`` are those of the variable.
    """

    def __init__(
        self, infer: Inference, var: Var, places: frozenset[Place], reads: Iterable[Read]
    ) -> None:
        self.infer = infer
        self.var = var
        self.gated = {name for name, _ in places}
        self.summed = {(o, read.node) for read in reads if not read.stays for o in read.operands}
        self.known: dict[Node, bool | None] = {}
        self.numbers: dict[Node, float] = {}
        # nodes whose closed slots are all alike, with the nodes of zeros that this follows from
        self.alike: dict[Node, frozenset[Node]] = {}
        self.counts: dict[Node, int] = {}

    def at(self, node: Node) -> bool | None:
        """Zero at a closed slot? None where the node does not carry the variable."""
        pending = [node]
        while pending:  # by hand: graphs are deeper than Python's stack
            top = pending[-1]
            missing = [n for n in top.all_input_nodes if n not in self.known and self._count(top)]
            if missing:
                pending += missing
            else:
                self.known[top] = self._of(top)
                pending.pop()
        return self.known[node]

    def end_at(self, read: Read) -> bool:
        """Does a closed slot add exactly nothing there?

        It does where it is zero, or where the weight that reads it can be made zero: but zero times
        what is no number is none.
        """
        is_zero = [self.at(operand) is True for operand in read.operands]
        is_number = all(isfinite(self.numbers.get(o, 0.0)) for o in read.operands)
        is_told = self.told(read) is not None
        return is_number and (any(is_zero) or read.place is not None or is_told)

    def told(self, read: Read) -> frozenset[Node] | None:
        """The zeros from which an export can tell what closed slots added to a sum or a variance.

        They are none where the slots are zero. None where what they added cannot be told.
        """
        if operator_name(read.node.target) not in TELLING or len(read.operands) != 1:
            return None
        (operand,) = read.operands
        if self.at(operand) is True:
            return frozenset()
        reduced = reduced_dims(argument(read.node, 1, "dim"), len(self.infer.dims(operand)))
        varying = [d for d in reduced if any(variables(self.infer.dims(operand)[d]))]
        return self.alike.get(operand) if len(varying) == 1 else None

    def _of(self, node: Node) -> bool | None:
        count = self._count(node)
        if not count:
            return None
        if node.op == "placeholder":
            if self.infer.captured.names.get(node.name) in self.gated:
                self.numbers[node] = 0.0
                self.alike[node] = frozenset([node])
            return node in self.numbers
        operands = [self._reaching(operand, node) for operand in node.all_input_nodes]
        if any(0 < self._count(operand) < count for operand in node.all_input_nodes):
            return False  # x_i + x_j: what is known of an operand holds along one of the dims
        number = self._number(node, operands)
        if not self._is_overwritten(node):
            if number is not None:
                self.numbers[node] = number
            if number == 0:
                self.alike[node] = frozenset([node])
            elif count == 1 and _is_slot_by_slot(node):
                self._follow_alike(node)
        return self.numbers.get(node) == 0

    def _follow_alike(self, node: Node) -> None:
        """Of operands that are alike at closed slots, or have no slots, the result is, too."""
        carrying = [operand for operand in node.all_input_nodes if self._count(operand)]
        if carrying and all(operand in self.alike for operand in carrying):
            self.alike[node] = frozenset().union(*(self.alike[operand] for operand in carrying))

    def _number(self, node: Node, operands: list[bool | None]) -> float | None:
        """What the node is at a closed slot: zero, another number, or None where it depends."""
        pairs = zip(node.all_input_nodes, operands, strict=True)
        reaching = [operand for operand, is_zero in pairs if is_zero is not None]
        numbers = {o: self.numbers[o] for o in reaching if o in self.numbers}
        if zero_of(node) is zero_when_tried:
            return tried(node, numbers) if numbers else None
        if not all(map(isfinite, numbers.values())):
            return nan
        is_zero = zero_of(node)(node, operands)
        if is_zero:
            return 0.0 if is_zero is True else nan
        viewed = _viewed(node)
        return None if viewed is None else numbers.get(viewed)

    def _reaching(self, operand: Node, node: Node) -> bool | None:
        """Whether the operand is zero at the slot; None if no slot of it reaches the output.

        Of W·x, with rows and columns of W on the same axis, the output has the rows' slots.
        """
        is_summed = (operand, node) in self.summed and self._count(operand) == 1
        return None if is_summed else self.known[operand]

    def sources(self, node: Node) -> Iterator[Place]:
        """The parameters for which a node that carries the variable is not zero."""
        pending, seen = [node], {node}
        while pending:
            top = pending.pop()
            if top.op == "placeholder":
                yield from self._places(self.infer.captured.names.get(top.name, ""))
            for operand in top.all_input_nodes:
                if self.known.get(operand) is False and operand not in seen:
                    seen.add(operand)
                    pending.append(operand)

    def _places(self, name: str) -> Iterator[Place]:
        """The dims of a parameter that carry the variable."""
        if name in self.infer.captured.parameters:
            for dim, expr in enumerate(self.infer.tensors[name]):
                if any(self.var is v for v in variables(self.infer.solver.resolve(expr))):
                    yield name, dim

    def _is_overwritten(self, node: Node) -> bool:
        """An in-place operator changes this value, does not keep zeros, and it is read afterwards.

        What the operator itself returns is a node of its own, and speaks for itself.
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
        """Does an in-place operator leave zeros whatever its other operands are?"""
        operands = [True if each is written else None for each in writer.all_input_nodes]
        return zero_of(writer)(writer, operands) is True

    def _count(self, node: Node) -> int:
        """How many dims of the node (of one of its outputs) carry the variable."""
        if node not in self.counts:
            value = self.infer.values.get(node)
            self.counts[node] = max(
                sum(self._carries(dim) for dim in dims)
                for dims in (value if isinstance(value, list) else [value or ()])
            )
        return self.counts[node]

    def _carries(self, dim: Expr) -> bool:
        return any(self.var is v for v in variables(self.infer.solver.resolve(dim)))


def _is_slot_by_slot(node: Node) -> bool:
    """Is each slot of the result made of the same slots of the operands, each time alike?"""
    target: Any = node.target
    is_same = zero_of(node) is zero_when_tried or operator_name(target) in IDENTITIES
    tags, schema = getattr(target, "tags", ()), schema_of(target)
    is_random = torch.Tag.nondeterministic_seeded in tags
    return is_same and not is_random and schema is not None and not schema.is_mutable


def _viewed(node: Node) -> Node | None:
    """The operand that the node gives out in another shape, unchanged; None if it does not."""
    if is_writer(node) or not may_view(node):
        return None
    first = node.args[0]
    return first if isinstance(first, Node) else None


def zeroing(
    infer: Inference, var: Var, written: Collection[Place], reads: Collection[Read]
) -> tuple[list[Place], Zeros, Read | None]:
    """Where gates have to act to make closed slots zero at all ``reads`` that have no weight.

    Gates on what writes the slots may not be enough: a class token, the positions or a norm's
    shift put values there, too. Those parameters are added as the reads show that they matter.

    Returns the places, what is zero then, and the first read at which a slot cannot be zero.
    """
    places = list(dict.fromkeys(written))
    while True:
        zeros = Zeros(infer, var, frozenset(places), reads)
        missed = [read for read in reads if not zeros.end_at(read)]
        more = {p for read in missed for o in read.operands for p in zeros.sources(o)}
        new = sorted(more.difference(places))
        if not missed or not new:
            return places, zeros, missed[0] if missed else None
        places += new


def zero_of(node: Node) -> Zero:
    """How the operator of this node treats slots that are exactly zero."""
    known = registered(operator_name(node.target))
    if known is not None:
        return ZEROS[known]
    return zero_when_tried if is_pointwise(node.target) else never
