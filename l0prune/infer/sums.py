"""Branches that are added to a stream.

Such a one is exactly zero where a few parameters are: the last ones before the sum, of a
convolution and its bias, a norm, a scale. Then the sum is its other operand.
"""

from __future__ import annotations

from cmath import isfinite
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch.fx import Node

from l0prune.infer.ending import SUMS, Ending
from l0prune.infer.inference import Inference
from l0prune.infer.memory import Memory
from l0prune.infer.nodes import dtype_of, has_tensor, operator_name, shape_of
from l0prune.infer.regions import region, shared_module, untaken
from l0prune.infer.zero_flow import when_zero, zero_at
from l0prune.plan.needs import Needs

_DEEPEST = 100  # operators between a branch's last parameters and its end


def added(
    infer: Inference, read: Mapping[Node, Needs], macs: Mapping[Node, float], taken: set[str]
) -> Iterator[Ending]:
    """Those of a graph that inference has been through, in the order of their sums.

    Args:
        infer: that.
        read: of each node whether any output needs it.
        macs: of each node that does work.
        taken: names that are taken already; theirs are added.
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
            name = shared_module(node for node in found if node in macs) or _owner(tensors[0])
            name = untaken(name, taken)
            yield Ending(name, end, (join,), tuple(dict.fromkeys(tensors)))


def _is_number(infer: Inference, tensors: list[str], end: Node, nodes: list[Node]) -> bool:
    """Check that a branch is no 0/0, as of a spectral norm, where these parameters are zero."""
    number, _ = when_zero(infer, tensors, nodes).get(end, (0.0, None))
    return isfinite(number)


def _owner(tensor: str) -> str:
    return tensor.rpartition(".")[0] or tensor


def _operands(join: Node) -> Iterator[Node]:
    """What may be a branch: without it the sum is a tensor of its own shape and dtype."""
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
        alone = ({operand: names} for operand, names in own.items())
        for some in (both, *alone):
            if self._is_zero(node, some):
                return [name for names in some.values() for name in names]
        return None

    def _is_zero(self, node: Node, zeros: dict[Node, list[str]]) -> bool:
        """Is the node zero where these operands are, whatever the other tensors are?"""
        operands = node.all_input_nodes
        states = [o in zeros if has_tensor(o) else None for o in operands]
        return bool(zeros) and zero_at(self._infer, node, states) is True

    def _parameter(self, node: Node) -> str | None:
        """The name of a parameter with a dim that only the region reads."""
        if node.op != "placeholder" or not self._infer.is_parameter(node):
            return None
        name = self._infer.captured.names[node.name]
        has_dims = bool(self._infer.tensors.get(name))
        return name if has_dims and self._users[name] <= self._region else None
