"""The registry of rules: what each operator does to the axes of its operands.

A rule is a function of the inference and a graph node that returns the node's value: one
expression per dim of its output (or a list of such values for an operator with many outputs).
It unifies what the operator ties, pins what it forbids, and records what it contracts::

    @rule("aten.glu", zero=some)
    def glu(infer: Inference, node: Node) -> Value:
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch.fx import Node

from l0prune.infer.expressions import Expr

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference

Value: TypeAlias = "tuple[Expr, ...] | list[tuple[Expr, ...]] | None"
Rule: TypeAlias = "Callable[[Inference, Node], Value]"
# Given, for each tensor operand that carries a slot, whether it is exactly zero there (None for
# an operand that does not carry the slot): is the output exactly zero there? A rule answers with
# nan where it is not a number, or has no finite gradient.
Zero: TypeAlias = Callable[[Node, Sequence[bool | None]], bool | float]


def never(node: Node, operands: Sequence[bool | None]) -> bool:
    """The output need not be zero: f(0) ≠ 0, or slots mix."""
    return False


def each(node: Node, operands: Sequence[bool | None]) -> bool:
    """Zero where every operand that carries the slot is: data movement, f(0) = 0."""
    return all(operand is not False for operand in operands)


def some(node: Node, operands: Sequence[bool | None]) -> bool:
    """Zero where any operand is: products."""
    return any(operand is True for operand in operands)


def of_operand(number: int) -> Zero:
    """Zero where the operand of this number is, whatever the others are."""

    def zero(node: Node, operands: Sequence[bool | None]) -> bool:
        return len(operands) > number and operands[number] is True

    return zero


def affine(position: int) -> Zero:
    """Zero where the weight, the argument of this position, is, and the bias after it: y·w + b."""

    def zero(node: Node, operands: Sequence[bool | None]) -> bool:
        is_scaled = len(node.args) > position and isinstance(node.args[position], Node)
        return is_scaled and all(operand is True for operand in operands[1:3])

    return zero


class NotFollowed(Exception):
    """Raised by a rule for a use of its operator that it does not cover: all operands are pinned.

    The text says what is special in this use: "its groups are as many as the batch".
    """


RULES: dict[str, Rule] = {}
ZEROS: dict[str, Zero] = {}


def rule(*operators: str, zero: Zero = never) -> Callable[[Rule], Rule]:
    """Register a rule for operators, by qualified name without overload: ``aten.conv2d``.

    A rule serves the in-place twin of its operator (``aten.relu_``), too.
    """

    def register(function: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = function
            ZEROS[operator] = zero
        return function

    return register


def registered(name: str) -> str | None:
    """The name under which there is a rule for an operator: its own, or its out-of-place twin's."""
    return next((n for n in (name, name.removesuffix("_")) if n in RULES), None)
