"""Is a slot exactly zero where it is read, once its writers are multiplied by zero?"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from l0prune.axes.inference import Inference, Place, Read
from l0prune.axes.nodes import is_pointwise, operator_name
from l0prune.axes.registry import ZEROS, Zero, never, registered
from l0prune.axes.rules.pointwise import zero_when_tried
from l0prune.axes.solver import Expr, Var, variables


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

    def _of(self, node: Node) -> bool | None:
        count = self._count(node)
        if not count:
            return None
        if node.op == "placeholder":
            return self.infer.captured.names.get(node.name) in self.gated
        operands = [self._reaching(operand, node) for operand in node.all_input_nodes]
        if any(0 < self._count(operand) < count for operand in node.all_input_nodes):
            return False  # x_i + x_j: what is known of an operand holds along one of the dims
        return zero_of(node)(node, operands) and not self._is_overwritten(node)

    def _reaching(self, operand: Node, node: Node) -> bool | None:
        """Whether the operand is zero at the slot; None if no slot of it reaches the output.

        Of W·x, with rows and columns of W on the same axis, the output has the rows' slots.
        """
        is_summed = (operand, node) in self.summed and self._count(operand) == 1
        return None if is_summed else self.known[operand]

    def _is_overwritten(self, node: Node) -> bool:
        """An in-place operator later changes this value and does not keep zeros."""
        for user in node.users:
            schema = getattr(user.target, "_schema", None)
            if schema is None or not user.args or user.args[0] is not node:
                continue
            if schema.is_mutable:
                operands = [True if arg is node else None for arg in user.all_input_nodes]
                if not zero_of(user)(user, operands):
                    return True
            elif any(r.alias_info for r in schema.returns) and self._is_overwritten(user):
                return True  # through a view
        return False

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


def zero_of(node: Node) -> Zero:
    """How the operator of this node treats slots that are exactly zero."""
    known = registered(operator_name(node.target))
    if known is not None:
        return ZEROS[known]
    return zero_when_tried if is_pointwise(node) else never
