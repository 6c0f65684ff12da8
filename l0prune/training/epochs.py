"""The epochs of a run, told to whoever watches; without a watcher nothing happens.

with watched(print):
    l0prune.finetune(model, data, out="run")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from l0prune.training.history import History

Watcher = Callable[[History], None]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher of epochs", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within the context, ``watcher`` is told after each epoch, once its checkpoint is written.

    Where several processes train together the first one tells, and the others wait.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def done(history: History) -> None:
    """An epoch is done, the last one of this history."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(history)
