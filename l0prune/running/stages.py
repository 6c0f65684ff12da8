"""The stages of a long piece of work, told to whoever watches; without a watcher nothing happens.

with watched(print):
    l0prune.export(model)

The watcher is told when a stage begins, and again when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from l0prune.running.watching import Happenings


@dataclass(frozen=True)
class Stage:
    """A stage that begins, or that is done.

    Attributes:
        name: what is being done, for people.
        seconds: how long it took; None while it has only begun.
    """

    name: str
    seconds: float | None = None


_stages: Happenings[Stage] = Happenings("stages")
watched = _stages.watched


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Announce the context, or the decorated function, as a stage of this name."""
    start = time.monotonic()
    _stages.tell(Stage(name))
    try:
        yield
    finally:
        _stages.tell(Stage(name, time.monotonic() - start))
