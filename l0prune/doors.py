"""Doors: functions that a room provides to rooms above it, imported when they are first asked for.

A room imports only those above it in the table of ``docs/architecture.md``. Where the mechanism
asks something that only a later room can answer (how fast a runtime is at some widths), it asks
here, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_PROVIDERS = {"latency_table": "timing.measure", "width_times": "timing.width_probe"}


def provided(name: str) -> Callable[..., Any]:
    """Return the function of this name from the module that provides it."""
    function: Callable[..., Any] = getattr(import_module(f"l0prune.{_PROVIDERS[name]}"), name)
    return function
