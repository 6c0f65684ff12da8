"""The registry of rules: the effect of each operator on the axes of its operands.

A rule is a function of the inference and a graph node that returns the node's value: one
expression per dim of its output (or a list of such values for an operator with many outputs).
It unifies what the operator ties, pins what it forbids, and records what it contracts::

    @rule("aten.glu", zero=some)
    def glu(infer: Inference, node: Node) -> Value:
        ...

A rule that fails pins the operands of its operator; a pass that fails raises a CaptureError that
names the operator. With ``L0PRUNE_STRICT=1`` in the environment both raise the error itself.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from torch.fx import Node

from l0prune.doors import Registry
from l0prune.errors import CaptureError, L0pruneError
from l0prune.infer.nodes import called
from l0prune.infer.solver import Expr

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
    """Zero where the operand of this number is, for any values of the others."""

    def zero(node: Node, operands: Sequence[bool | None]) -> bool:
        return len(operands) > number and operands[number] is True

    return zero


def affine(position: int) -> Zero:
    """Zero where the weight, argument ``position``, and the bias after it are: y·w + b."""

    def zero(node: Node, operands: Sequence[bool | None]) -> bool:
        is_scaled = len(node.args) > position and isinstance(node.args[position], Node)
        return is_scaled and all(operand is True for operand in operands[1:3])

    return zero


class NotFollowed(Exception):
    """Error of a rule for a use of its operator that it does not cover: all operands are pinned.

    The text describes this use: "its groups are as many as the batch".
    """


RULES: Registry[Rule] = Registry("rule", "rules")
ZEROS: Registry[Zero] = Registry("zero rule", "rules")


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


P = ParamSpec("P")
R = TypeVar("R")


def is_strict() -> bool:
    """Check whether errors in rules and passes are raised."""
    return os.environ.get("L0PRUNE_STRICT") == "1"


def failure(rule: str, node: Node, error: Exception) -> str:
    """Return the reason of a pin where a rule for this call failed; raise the error if strict."""
    if is_strict():
        raise error
    return f"l0prune's {rule} for {called(node)} failed ({said(error)}); please report this"


def explained(analysis: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise its unforeseen errors as CaptureErrors that name operator and line."""

    @wraps(analysis)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return analysis(*args, **kwargs)
        except Exception as error:
            if is_strict() or isinstance(error, L0pruneError):
                raise
            node = worked_at(error)
            where = f" at operator {called(node)}" if node is not None else ""
            raise CaptureError(
                f"l0prune failed{where} while it analysed the graph ({said(error)}). This is a "
                "mistake in l0prune: please report it. Until it is mended, give it a submodule "
                "without this operator."
            ) from error

    return explaining


def said(error: Exception) -> str:
    """Return the error's class and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def worked_at(error: Exception) -> Node | None:
    """Return the call node in the innermost frame of a traceback that has one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, Node) and value.op == "call_function":
                return value
    return None
