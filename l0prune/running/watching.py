"""Events of long work, for those who watch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Happenings(Generic[T]):
    """Happenings of one kind, and all who are told of them in this context."""

    def __init__(self, name: str) -> None:
        self._watchers: ContextVar[tuple[Callable[[T], None], ...]] = ContextVar(name, default=())

    @contextmanager
    def watched(self, watcher: Callable[[T], None]) -> Iterator[None]:
        """Within the context, ``watcher`` is told of each happening."""
        token = self._watchers.set((*self._watchers.get(), watcher))
        try:
            yield
        finally:
            self._watchers.reset(token)

    def tell(self, happening: T) -> None:
        """Something has happened."""
        for watcher in self._watchers.get():
            watcher(happening)
