"""Lines of the user's code: at which torch takes a free size for a number, or which raise."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from l0prune.capture.compat import SIZE_ASKED, SIZE_FIXED, replaced

_OWN = Path(__file__).parent.parent
_CAPTURE = str(Path(__file__).with_name("symbolic.py"))  # beyond it is who asked for the capture
_LIBRARY = Path(torch.__file__).parent
_Line = tuple[str, int]


@dataclass
class Places:
    """Notes of a capture.

    Attributes:
        fixed: where a size became a number.
        asked: where the code asked about sizes, with the answer as an expression that must hold.
    """

    fixed: list[_Line] = field(default_factory=list)
    asked: list[tuple[_Line, Any]] = field(default_factory=list)

    @property
    def decisive(self) -> str:
        """Line at which a size was fixed last, or else first constrained."""
        broken = (line for line, what in self.asked if not _holds_for_others(what))
        line = self.fixed[-1] if self.fixed else next(broken, None)
        if line is None:
            return ""
        return _shown(line)


@contextmanager
def noted_places() -> Iterator[Places]:
    """The places of what is captured within the context."""
    places = Places()

    def becomes(env: Any, symbol: Any, value: Any, *rest: Any, **named: Any) -> None:
        if getattr(value, "is_number", False) and (place := _place()):
            places.fixed.append(place)

    def asks(env: Any, prefix: str, what: Any, *rest: Any, **named: Any) -> None:
        if place := _place():
            places.asked.append((place, what))

    with ExitStack() as stack:
        for (owner, name), note in ((SIZE_FIXED, becomes), (SIZE_ASKED, asks)):
            stack.enter_context(replaced(owner, name, _after(note, getattr(owner, name, None))))
        yield places


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's code that an error came through; empty if there is none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, number) for frame, number in frames]
    own = [line for line in lines if not _is_library(line[0])]
    return _shown(own[-1]) if own else ""


def _shown(line: _Line) -> str:
    file, number = line
    return f'{os.path.basename(file)}:{number}, "{linecache.getline(file, number).strip()}"'


def _after(note: Any, method: Any) -> Any:
    """Return the method with a call of ``note`` before it."""

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    return noted


def _place() -> _Line | None:
    """The line of the user's code that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        file = frame.f_code.co_filename
        if not _is_library(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


@functools.cache
def _is_library(file: str) -> bool:
    parents = Path(file).parents
    return _OWN in parents or _LIBRARY in parents or file.startswith("<") or "unittest" in file


def _holds_for_others(what: Any) -> bool:
    """Return whether an expression in symbols holds for larger sizes, too."""
    try:
        return all(
            bool(what.subs(dict.fromkeys(what.free_symbols, size)))
            for size in (3, 4, 5, 7, 64, 999)
        )
    except (TypeError, ZeroDivisionError):  # it is not decided, or no number
        return False
