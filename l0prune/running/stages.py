"""The stages of a long piece of work, told to whoever watches; without a watcher nothing happens.

with watched(print):
    l0prune.export(model)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage that begins, or that is done.

    Attributes:
        name: what is being done, for people.
        seconds: how long it took; None while it has only begun.
    """

    name: str
    seconds: float | None = None


Watcher = Callable[[Stage], None]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within the context, ``watcher`` is told when a stage begins, and again when it is done."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs in the context, or in the function that it decorates, is a stage of this name."""
    watcher = _watcher.get()
    if watcher is None:
        yield
        return
    start = time.monotonic()
    watcher(Stage(name))
    try:
        yield
    finally:
        watcher(Stage(name, time.monotonic() - start))
