"""Wrappers that other packages put around a model's forward, which are no part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# By accelerate's prepare, on the model itself: a forward under autocast, and the one before it.
_WRAPPED, _OWN = "forward", "_original_forward"


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Within the context every module has the forward of its class."""
    found = [(module, taken) for module in model.modules() if (taken := _taken_off(module))]
    try:
        yield
    finally:
        for module, taken in found:
            vars(module).update(taken)


def take_off(model: nn.Module) -> None:
    """Give every module of a copy the forward of its class, for good."""
    for module in model.modules():
        _taken_off(module)


def _taken_off(module: nn.Module) -> dict[str, Any]:
    held = vars(module)
    return {name: held.pop(name) for name in (_WRAPPED, _OWN)} if _OWN in held else {}
