"""Parts of a network that a factor of zero makes constant, found on its graph.

Where one number for each example, such as the gate of a block, multiplies a value, and what follows
reads nothing else but weights, all of that is known once the number is zero: up to where it meets
another value, a shortcut. Then nothing before needs to be computed, for that number is all that it
depends on.
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

# What gives exactly zero, and not by chance: clamps, and answers to yes or no as a number.
_ENDING_AT_ZERO = ("aten.clamp", "aten.clamp_", "aten.relu", "aten.relu_", "aten.hardtanh",
                   "aten.hardtanh_", "aten.to", "aten._to_copy", "aten.type_as")  # fmt: skip
_PRODUCTS = ("aten.mul", "aten.mul_")


@dataclass(frozen=True)
class Skip:
    """Nodes of a graph that need not be computed while a factor is zero.

    Attributes:
        factor: the name of its node; one number.
        ends: names of the values that others read, and which are known then.
        values: of these, of one example.
    """

    factor: str
    ends: tuple[str, ...]
    values: tuple[Tensor, ...]


def skips(network: GraphModule) -> list[Skip]:
    """Return all such parts, in the order of the graph.

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
    """Return whether a node makes something of a value that is not known; checks do not."""
    return user not in known and (user.op == "output" or bool(user.users))


class _Stored:
    """Values of a graph that no input has a part in."""

    def __init__(self, network: GraphModule) -> None:
        self._network, self._values = network, dict[Node, Any]()

    def has(self, node: Node) -> bool:
        """Return whether the node is stored, or made of what is."""
        return node.op == "get_attr" or (
            node.op == "call_function" and all(map(self.has, node.all_input_nodes))
        )

    def value(self, node: Node) -> Any:
        """Return the value of such a node."""
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
    """Return the values that are known once the factor is zero, but those that always are."""
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
    """A network that also returns its factors and what they decide about, for the exporter.

    Attributes:
        network: a program of one example as a module.
    """

    def __init__(self, network: GraphModule, found: Sequence[Skip]) -> None:
        super().__init__()
        self.network = network
        self._wanted = [name for skip in found for name in (skip.factor, *skip.ends)]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of the output; then of each skip the factor and the ends."""
        run = _Watched(self.network, {}, self._wanted)
        outputs = run.outputs(args, kwargs)
        return (*outputs, *(run.seen[name] for name in self._wanted))


class Forced(nn.Module):
    """A network whose factors are one number, whatever the input."""

    def __init__(self, network: GraphModule, found: Sequence[Skip], number: float) -> None:
        super().__init__()
        self.network = network
        self._numbers = {skip.factor: number for skip in found}

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the tensors of the output."""
        return _Watched(self.network, self._numbers, []).outputs(args, kwargs)


class _Watched(Interpreter):
    """A graph, run node by node, some of which are looked at, or set."""

    def __init__(
        self, network: GraphModule, numbers: Mapping[str, float], wanted: Sequence[str]
    ) -> None:
        super().__init__(network)
        self._numbers, self._wanted = numbers, set(wanted)
        self.seen: dict[str, Any] = {}

    def run_node(self, node: Node) -> Any:
        """Compute one node."""
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
