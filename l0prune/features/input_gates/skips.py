"""Subgraphs that become constant when a factor is zero, found on the captured graph.

A factor is one number for each example, such as the gate of a block, that multiplies a value. If it
is zero, all later values that depend on this product and on weights only are constant, up to where
another value, such as a shortcut, is added. Nodes that only these constants need can be skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from l0prune.capture.compat import pytree
from l0prune.infer.nodes import operator_name

# Operators that give exact zeros by design: clamps, and casts of booleans to numbers.
_ENDING_AT_ZERO = ("aten.clamp", "aten.clamp_", "aten.relu", "aten.relu_", "aten.hardtanh",
                   "aten.hardtanh_", "aten.to", "aten._to_copy", "aten.type_as")  # fmt: skip
_PRODUCTS = ("aten.mul", "aten.mul_")


@dataclass(frozen=True)
class Skip:
    """Nodes of a graph that need not be computed while a factor is zero.

    Attributes:
        factor: name of the factor's node; one number.
        ends: names of the values that other nodes read and that are constant then.
        values: the constants of the ends, for one example.
    """

    factor: str
    ends: tuple[str, ...]
    values: tuple[Tensor, ...]


def skips(network: GraphModule) -> list[Skip]:
    """Return all skips, in the order of the graph.

    Args:
        network: a program of one example as a module.
    """
    stored = _Stored(network)
    found = []
    for node in network.graph.nodes:
        if not stored.has(node) and _may_be_zero(node):
            known = _known(network, node, stored)
            ends = [end for end in known if any(_reads(user, known) for user in end.users)]
            ends = [end for end in ends if end is not node]
            if ends:
                names = tuple(end.name for end in ends)
                found.append(Skip(node.name, names, tuple(known[end] for end in ends)))
    return found


def _reads(user: Node, known: Mapping[Node, Tensor]) -> bool:
    """Return whether a node of unknown value uses its operands; assertions do not."""
    return user not in known and (user.op == "output" or bool(user.users))


class _Stored:
    """Values of a graph that depend on no input."""

    def __init__(self, network: GraphModule) -> None:
        self._network, self._values = network, dict[Node, Any]()

    def has(self, node: Node) -> bool:
        """Return whether the node's value depends on stored tensors only."""
        return node.op == "get_attr" or (
            node.op == "call_function" and all(map(self.has, node.all_input_nodes))
        )

    def value(self, node: Node) -> Any:
        """Return the value of a node that depends on stored tensors only."""
        if node not in self._values:
            is_stored = node.op == "get_attr"
            found = self._attribute(node) if is_stored else _called(node, self.value)
            self._values[node] = found
        return self._values[node]

    def _attribute(self, node: Node) -> Any:
        found: Any = self._network
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return found


def _called(node: Node, value: Any) -> Any:
    args: Any = map_arg(node.args, value)
    kwargs: Any = map_arg(node.kwargs, value)
    assert callable(node.target)
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _may_be_zero(node: Node) -> bool:
    value = node.meta.get("val")
    is_one = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    return is_one and operator_name(node.target) in _ENDING_AT_ZERO


def _known(network: GraphModule, factor: Node, stored: _Stored) -> dict[Node, Tensor]:
    """Return the values that are constant only if the factor is zero."""
    like = factor.meta["val"]
    known = {factor: torch.zeros(like.shape, dtype=like.dtype)}
    following = False
    for node in network.graph.nodes:
        following |= node is factor
        operands = node.all_input_nodes
        if not following or node in known or not any(each in known for each in operands):
            continue
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        zeros = any(each in known and not known[each].any() for each in operands)
        if zeros and operator_name(node.target) in _PRODUCTS:
            known[node] = torch.zeros(value.shape, dtype=value.dtype)
        elif all(each in known or stored.has(each) for each in operands):
            known[node] = _called(node, lambda n: known[n] if n in known else stored.value(n))
    return known


class WithSkips(nn.Module):
    """Network for the exporter that also returns the factors and ends of its skips.

    Attributes:
        network: a program of one example as a module.
    """

    def __init__(self, network: GraphModule, found: Sequence[Skip]) -> None:
        super().__init__()
        self.network = network
        self._wanted = [name for skip in found for name in (skip.factor, *skip.ends)]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the output tensors, then the factor and the ends of each skip."""
        run = _Watched(self.network, {}, self._wanted)
        outputs = run.outputs(args, kwargs)
        return (*outputs, *(run.seen[name] for name in self._wanted))


class Forced(nn.Module):
    """Network whose factors are replaced by a constant."""

    def __init__(self, network: GraphModule, found: Sequence[Skip], number: float) -> None:
        super().__init__()
        self.network = network
        self._numbers = {skip.factor: number for skip in found}

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the tensors of the output."""
        return _Watched(self.network, self._numbers, []).outputs(args, kwargs)


class _Watched(Interpreter):
    """Interpreter of a graph that records the values of some nodes and replaces others."""

    def __init__(
        self, network: GraphModule, numbers: Mapping[str, float], wanted: Sequence[str]
    ) -> None:
        super().__init__(network)
        self._numbers, self._wanted = numbers, set(wanted)
        self.seen: dict[str, Any] = {}

    def run_node(self, node: Node) -> Any:
        """Compute one node; replace and record its value where asked for."""
        found = super().run_node(node)
        if node.name in self._numbers:
            found = torch.full_like(found, self._numbers[node.name])
        if node.name in self._wanted:
            self.seen[node.name] = found
        return found

    def outputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of the output."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        found = pytree.tree_leaves(self.run(*leaves, enable_io_processing=False))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]
