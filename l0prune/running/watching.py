"""What happens in a long piece of work, told to whoever watches, if anybody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Happenings(Generic[T]):
    """Happenings of one kind, and who is told of them in this context."""

    def __init__(self, name: str) -> None:
        self._watcher: ContextVar[Callable[[T], None] | None] = ContextVar(name, default=None)

    @contextmanager
    def watched(self, watcher: Callable[[T], None]) -> Iterator[None]:
        """Within the context, ``watcher`` is told of each happening."""
        token = self._watcher.set(watcher)
        try:
            yield
        finally:
            self._watcher.reset(token)

    def tell(self, happening: T) -> None:
        """Something has happened."""
        watcher = self._watcher.get()
        if watcher is not None:
            watcher(happening)
