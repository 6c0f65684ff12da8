"""Heartbeat of processes that train together: a lost machine is detected and reported.

A process that ends closes its connections, and the others notice at once. A machine that loses
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
_PARTING = 1.0  # seconds for a thread's last message, since the store may have ended


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
    """Sender of one process's signs of life, and watcher of those of the others.

    Args:
        store: that the processes share, over a connection that nothing else uses.
        key: prefix of this group's keys in the store.
        rank: number of this process, from 0.
        size: count of the processes.
        after: seconds without a sign of life after which a process counts as lost.
        say: called with a message when one is lost, in one of the processes that are left.
        end: called then in each process that is left.
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
        """Start the threads; all processes must have created their ``Heartbeat`` before."""
        self._heard = [time.monotonic()] * len(self._keys)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop, and mark this process as left, so that others do not wait for it."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_PARTING)

    def _beat(self) -> None:
        """Write this process's signs and read the others'; it may hang once the store has ended."""
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
        except Exception:  # the store ended with its process: no signs can be read from here on
            return

    def _watch(self) -> None:
        while not self._stopped.wait(self._after / _BEATS):
            now = time.monotonic()
            lost = [n for n, heard in enumerate(self._heard) if now - heard > self._after]
            if not lost:
                continue
            left = [n for n in range(len(self._keys)) if n not in lost]
            if self._rank in lost:  # nothing was read: the machine that hosts the store is lost
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
    """End all processes, with a message, if one is lost within the context.

    Args:
        store: see ``Heartbeat``, as for ``key``, ``rank`` and ``size``.
        meet: barrier, which returns when all processes have called it.
    """
    # A step that waits for a lost machine can only be ended by ending its process. Files are
    # written atomically, so that none is damaged.
    say, end = partial(print, "error:", file=sys.stderr, flush=True), partial(os._exit, 1)
    beat = Heartbeat(store, key, rank, size, lost_after(), say, end)
    meet()
    beat.start()
    try:
        yield
    finally:
        beat.stop()
