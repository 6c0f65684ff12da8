"""Stages of long work, announced to watchers; without a watcher nothing happens.

    with watched(print):
        l0prune.export(model)

A stage is announced when it begins, and again when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Events(Generic[T]):
    """Events of one kind, and their watchers in the current context."""

    def __init__(self, name: str) -> None:
        self._watchers: ContextVar[tuple[Callable[[T], None], ...]] = ContextVar(name, default=())

    @contextmanager
    def watched(self, watcher: Callable[[T], None]) -> Iterator[None]:
        """Pass each event within the context to ``watcher``."""
        token = self._watchers.set((*self._watchers.get(), watcher))
        try:
            yield
        finally:
            self._watchers.reset(token)

    def emit(self, event: T) -> None:
        """Call all watchers with an event."""
        for watcher in self._watchers.get():
            watcher(event)


@dataclass(frozen=True)
class Stage:
    """Stage that begins (``seconds`` is None), or ended after ``seconds``."""

    name: str
    seconds: float | None = None


_stages: Events[Stage] = Events("stages")
watched = _stages.watched


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Announce the context, or the decorated function, as a stage of this name."""
    start = time.monotonic()
    _stages.emit(Stage(name))
    try:
        yield
    finally:
        _stages.emit(Stage(name, time.monotonic() - start))
