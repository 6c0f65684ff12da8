"""Hooks of the user's inside of a model, which count on the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def watched(root: nn.Module) -> str:
    """Why hooks forbid a cut; else empty.

    The model's own outputs stay as they are, but not what is within. A module of a branch that is
    gone is not called at all.
    """
    for path, module in root.named_modules():
        if path and any(map(_is_users, _hooks_of(module))):
            return (
                f"{path} has hooks, which would see fewer channels, or nothing where a branch is "
                "gone"
            )
    return ""


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield from getattr(module, name, {}).values()


def _is_users(hook: Any) -> bool:
    """weight_norm and the like of torch.nn.utils are part of what the model computes."""
    made_by = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(made_by).startswith("torch.nn.")
