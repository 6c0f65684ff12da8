"""Ctrl-C and SIGTERM, taken between two steps rather than in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from l0prune.errors import Interrupted
from l0prune.running.processes import ALONE, World

# A terminal and torchrun both hand Ctrl-C on to each process.
_ECHO = 10.0  # seconds


class Interrupt:
    """Remembers a signal until somebody asks.

    Args:
        world: the processes that stop together, whichever of them it came to.
    """

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._number: int | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has come, to this process or another."""
        number = self._world.highest(self._number or 0)
        if number:
            raise Interrupted(number)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within the context a first signal is remembered and a second one acts as ever.

        Only the main thread can do this; in another one signals act as ever.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        try:
            yield
        finally:
            self._release()

    def _remember(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._when = number, now
            if not self._world.is_shared:
                self._release()
        elif now - self._when > _ECHO:
            self._release()
            signal.raise_signal(number)

    def _release(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            # A handler that was not installed from Python is None, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
