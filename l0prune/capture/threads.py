"""Locks and output streams of threads: one capture or export at a time, muting per thread."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from l0prune.capture.compat import TRACE_LOG

_ALONE, _CHANGING = threading.RLock(), threading.RLock()
_here = threading.local()  # per thread: the stream that it prints to, and the depth of muting
_users = 0  # open contexts of all threads that need the streams of the process replaced
_own: list[tuple[str, Any, Any]] = []  # name, stream of the process, ours


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock of the process within the context; the same thread may enter it again.

    torch.export keeps its state in globals, and captures and comparisons replace functions of
    torch, its default dtype and its random generator.
    """
    with _ALONE:
        yield


@contextmanager
def muted() -> Iterator[None]:
    """Drop this thread's prints, logs and warnings within the context."""
    _here.muted = _is_muted() + 1
    try:
        _mute()
        with printing_to(io.StringIO()):
            yield
    finally:
        _here.muted -= 1


@contextmanager
def printing_to(stream: Any) -> Iterator[None]:
    """Redirect this thread's stdout and stderr to the stream within the context."""
    while isinstance(stream, _Stream):
        stream = stream._stream
    before = getattr(_here, "stream", None)
    _here.stream = stream
    _exchange(1)
    try:
        yield
    finally:
        _exchange(-1)
        _here.stream = before


class _Stream:
    """Stream of the process that redirects threads which have a separate stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream of this thread."""
        found = getattr(_here, "stream", None)
        written: int = (self._stream if found is None else found).write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _exchange(step: int) -> None:
    """Install per-thread streams with the first context, and remove them with the last."""
    global _users
    with _CHANGING:
        _users += step
        if step > 0 and _users == 1:
            for name in ("stdout", "stderr"):
                before = getattr(sys, name)
                _own.append((name, before, _Stream(before)))
                setattr(sys, name, _own[-1][-1])
        elif not _users:
            for name, before, ours in _own:
                if getattr(sys, name) is ours:  # unless other code has replaced it meanwhile
                    setattr(sys, name, before)
            _own.clear()


def _is_muted() -> int:
    return getattr(_here, "muted", 0)


class _Muted:
    """Filter that drops all warnings and log records of muted threads."""

    def match(self, text: str) -> bool:
        """Return whether to ignore a warning, as a compiled pattern does."""
        return _is_muted() > 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record of a log."""
        return not _is_muted()


_MUTED = _Muted()
_IGNORED: Any = ("ignore", _MUTED, Warning, None, 0)


def _mute() -> None:
    """Install the filters of warnings and logs, which stay, and pass those of other threads."""
    with _CHANGING:
        if not any(each is _IGNORED for each in warnings.filters[:1]):
            with suppress(ValueError):
                warnings.filters.remove(_IGNORED)  # type: ignore[attr-defined]
            warnings.filters.insert(0, _IGNORED)  # type: ignore[attr-defined]
        known = {"": logging.root, **logging.root.manager.loggerDict}
        known.pop(TRACE_LOG, None)
        for logger in known.values():
            for handler in getattr(logger, "handlers", ()):
                handler.addFilter(_MUTED)
        if logging.lastResort is not None:
            logging.lastResort.addFilter(_MUTED)
