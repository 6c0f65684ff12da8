"""Heartbeat of processes that train together: a machine that goes away is noticed and said.

A process that ends closes its connections, and the others hear of it at once. A machine that loses
power or its network closes nothing: without this, the others would wait for its gradients for as
long as the longest step may take.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from l0prune.errors import UsageError

VARIABLE = "L0PRUNE_LOST_AFTER"
_AFTER = 120.0  # seconds without a sign of life
_BEATS = 10  # in that time
_LEFT = b"left"
_PARTING = 1.0  # seconds for the last word, where the store may be gone


def lost_after() -> float:
    """Return the seconds without a sign of life after which a process counts as lost.

    Raises:
        UsageError: the variable ``L0PRUNE_LOST_AFTER`` is no number of seconds.
    """
    text = os.environ.get(VARIABLE, str(_AFTER))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{VARIABLE}={text} is no number of seconds: give one above 0")
    return seconds


class Heartbeat:
    """Signs of life of one process, and a watch over those of the others.

    Args:
        store: that the processes share, over a connection that nothing else uses.
        key: of this group of processes in the store.
        rank: number of this process, from 0.
        size: count of the processes.
        after: seconds without a sign of life after which one is lost.
        say: called with a sentence, in one of the processes that are left.
        end: called in each of these then.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        rank: int,
        size: int,
        after: float,
        say: Callable[[str], None],
        end: Callable[[], None],
    ) -> None:
        self._store, self._rank, self._after = store, rank, after
        self._keys = [f"{key}/{number}" for number in range(size)]
        self._say, self._end = say, end
        self._stopped = threading.Event()
        self._seen: list[bytes] = [b""] * size
        self._heard = [time.monotonic()] * size  # when each of them last changed
        self._store.set(self._keys[rank], "0")
        self._threads = [
            threading.Thread(target=work, name="l0prune heartbeat", daemon=True)
            for work in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Begin; all processes must have made theirs before."""
        self._heard = [time.monotonic()] * len(self._keys)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, and say so, that the others do not wait for this process."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_PARTING)

    def _beat(self) -> None:
        """Write this process' signs and read the others'; where the store is gone, it may hang."""
        count = 0
        try:
            while not self._stopped.wait(self._after / _BEATS):
                count += 1
                self._store.set(self._keys[self._rank], str(count))
                for number, value in enumerate(self._store.multi_get(self._keys)):
                    if value == _LEFT:
                        self._heard[number] = float("inf")
                    elif value != self._seen[number]:
                        self._seen[number], self._heard[number] = value, time.monotonic()
            self._store.set(self._keys[self._rank], _LEFT.decode())
        except Exception:  # the store went with its process: then there is no news from here on
            return

    def _watch(self) -> None:
        while not self._stopped.wait(self._after / _BEATS):
            now = time.monotonic()
            lost = [n for n, heard in enumerate(self._heard) if now - heard > self._after]
            if not lost:
                continue
            left = [n for n in range(len(self._keys)) if n not in lost]
            if self._rank in lost:  # no news at all: the machine that keeps the store is gone
                self._say(_sentence("the other machines", self._after))
            elif self._rank == min(left):
                names = ", ".join(map(str, lost))
                self._say(_sentence(f"process {names}", self._after))
            self._end()
            return


def _sentence(of: str, after: float) -> str:
    return (
        f"contact with {of} was lost: there was no sign of life for {after:g} s. A machine or its "
        f"network went away, or a process hangs ({VARIABLE} sets the seconds). Start the same "
        "command again with --resume (resume=True); torchrun --max-restarts does so by itself"
    )


@contextmanager
def heartbeat(
    store: Any, key: str, rank: int, size: int, meet: Callable[[], None]
) -> Iterator[None]:
    """Within the context a process that is lost ends all, and is said.

    Args:
        store: see ``Heartbeat``, as for ``key``, ``rank`` and ``size``.
        meet: returns when all processes have called it.
    """
    # A step that waits for a machine that is gone can be ended in no other way than with its
    # process. Files are written whole or not at all, so that nothing is damaged.
    say, end = partial(print, "error:", file=sys.stderr, flush=True), partial(os._exit, 1)
    beat = Heartbeat(store, key, rank, size, lost_after(), say, end)
    meet()
    beat.start()
    try:
        yield
    finally:
        beat.stop()
