"""Where a branch of a graph ends: in a sum, or as a part of concatenations."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from l0prune.infer.expressions import Var
from l0prune.infer.nodes import CONCATENATIONS, argument, operator_name

SUMS = ("aten.add", "aten.add_")


@dataclass(frozen=True)
class Ending:
    """Where a branch ends.

    Attributes:
        name: of the branch.
        end: what the branch computes.
        joins: the one sum, or the concatenations, that take it.
        tensors: parameters for which the branch is zero where they are; empty for concatenations.
        axes: without whose slots the branch has no size; empty for a sum.
    """

    name: str
    end: Node
    joins: tuple[Node, ...]
    tensors: tuple[str, ...] = ()
    axes: tuple[Var, ...] = ()


def is_concatenation(node: Node) -> bool:
    """Does the node put tensors side by side?"""
    return node.op == "call_function" and operator_name(node.target) in CONCATENATIONS


def joined(join: Node) -> list[Node]:
    """What a sum adds, or a concatenation puts side by side."""
    parts = argument(join, 0, "tensors") if is_concatenation(join) else join.args[:2]
    return [part for part in parts if isinstance(part, Node)]
