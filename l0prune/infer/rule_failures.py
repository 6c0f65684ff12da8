"""Errors in rules and passes: a pin at the operator, or a CaptureError that names it.

With ``L0PRUNE_STRICT=1`` in the environment, as in the tests, they are raised instead.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.fx import Node

from l0prune.errors import CaptureError, L0pruneError
from l0prune.infer.nodes import called

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
    """Return the call that the failing code had at hand, in the innermost frame that has one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, Node) and value.op == "call_function":
                return value
    return None
