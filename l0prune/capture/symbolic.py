"""Captures with symbolic sizes, and the lines of the user's code that fix such a size or raise."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_symbols

from l0prune.capture.compat import SIZE_ASKED, SIZE_FIXED, replaced
from l0prune.capture.kept_state import exported
from l0prune.capture.sizes import (
    ALL_FIXED,
    ANY,
    Batches,
    FreeSizes,
    Inputs,
    batch_of,
    batch_shapes,
    widened,
)

_OWN = Path(__file__).parent.parent
_CAPTURE = str(Path(__file__).with_name("symbolic.py"))  # frames beyond it asked for the capture
_LIBRARY = Path(torch.__file__).parent
_Line = tuple[str, int]


@dataclass
class Places:
    """Source lines at which a capture fixed or constrained sizes.

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
def record_places() -> Iterator[Places]:
    """Record the lines that fix or constrain sizes in captures within the context."""
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
    """Return the innermost line of the user's code in an error's traceback; empty if none."""
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
    """Return the running line of the user's code, for the caller of a patched method."""
    frame: FrameType | None = sys._getframe(3)  # the caller of the patched method
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
    return all(_holds(what, size) for size in (3, 4, 5, 7, 64, 999))


def _holds(what: Any, size: int, otherwise: bool = False) -> bool:
    """Return whether an expression holds at this size; ``otherwise`` if that is undecided."""
    try:
        return bool(what.subs(dict.fromkeys(what.free_symbols, size)))
    except (TypeError, ZeroDivisionError):  # it is not decided, or no number
        return otherwise


@dataclass(frozen=True)
class Found:
    """Result of a capture with symbolic sizes.

    Attributes:
        program: the captured program; None if the capture failed.
        batches: batch sizes for which it is valid, if the batch is symbolic.
        is_free: whether the batch is symbolic.
        why_fixed: clause with the line of code at which torch fixed a size, the batch's if that is
            not free, or with torch's message.
        multiple: if there is no program, the number of which the batch has to be a multiple.
    """

    program: ExportedProgram | None = None
    batches: Batches = ANY
    is_free: bool = False
    why_fixed: str = ""
    multiple: int = 1


def with_symbols(model: nn.Module, example: Inputs, free: FreeSizes) -> Found:
    """Capture with a symbolic batch and ``free`` sizes, or else with the batch or them alone."""
    found = first = _with_batch(model, example, free)
    if free and first.program is None:
        found = _with_batch(model, example, ALL_FIXED)
        if found.program is None:
            found = _tried(model, example, free, None)
    return found if found.is_free else replace(found, why_fixed=first.why_fixed)


def _with_batch(model: nn.Module, example: Inputs, free: FreeSizes) -> Found:
    """Capture with a symbolic batch.

    torch.export reports of what it has to be a multiple, if the example's is a larger multiple.
    """
    found = _tried(model, example, free, ANY)
    multiple = found.multiple
    if found.program is None and multiple == 1:
        size = Batches(multiple=batch_of(*example))
        multiple = _tried(model, widened(*example, size), free, ANY).multiple
    if multiple > 1:
        found = replace(
            _tried(model, example, free, Batches(multiple, multiple)), why_fixed=found.why_fixed
        )
    return found


def _tried(model: nn.Module, example: Inputs, free: FreeSizes, batches: Batches | None) -> Found:
    """Capture with a batch of these sizes, or else with that of the example."""
    args, kwargs = widened(*example, batches) if batches else example
    with record_places() as places:
        try:
            shapes = batch_shapes(model, args, kwargs, batches, free)
            program = exported(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # the static capture comes next, and reports it
            said = re.search(r"\bbatch = (\d+)\*_batch\b", str(error))
            why = _at(places.decisive) or _said(error)
            return Found(why_fixed=why, multiple=int(said[1]) if said else 1)
    return Found(program, batches or ANY, batches is not None, _at(places.decisive))


def _at(place: str) -> str:
    return f"the model's code fixes it at {place}" if place else ""


def _said(error: Exception) -> str:
    """Return the first line of torch's error message, as a clause."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"torch.export says {type(error).__name__}: {first.rstrip('.')}"


def inputs_of(program: ExportedProgram) -> list[Any]:
    """Inputs of a captured program: fake tensors, symbolic numbers, or other values."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    given: tuple[Any, ...] = program.graph_signature.user_inputs
    return [nodes[each].meta.get("val") if each in nodes else each for each in given]


def symbolic(program: ExportedProgram, free: FreeSizes) -> frozenset[str]:
    """Return the names of the free sizes that are symbolic in all inputs of a program.

    A size with a guard that holds only near the example's (``size // 8 == 4``) counts as fixed,
    although torch.export calls it symbolic.
    """
    fixed = {
        name
        for value, dims in zip(inputs_of(program), free.dims, strict=False)
        for dim, name in dims.items()
        if not isinstance(value, Tensor) or not _takes_others(value.shape[dim])
    }
    return frozenset(free.names) - fixed


def _takes_others(size: Any) -> bool:
    """Return whether a size is symbolic, and all guards on it alone hold for another size."""
    if not free_symbols(size):
        return False
    expression, env, own = size.node.expr, size.node.shape_env, size.node.hint
    guards = [each.expr for each in env.guards if each.expr.free_symbols == {expression}]
    others = (2 * own, 3 * own, own + own // 2, own // 2, own // 3)
    return any(all(_holds(guard, other, otherwise=True) for guard in guards) for other in others)
