"""Sizes that are to be free and are not: where the model's code fixes them."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from l0prune.capture.capture import capture
from l0prune.capture.free_sizes import FreeSizes, Inputs

_OWN = Path(__file__).parent.parent
_LIBRARY = Path(torch.__file__).parent


def fixed_sizes(model: nn.Module, example: Inputs, free: FreeSizes) -> dict[str, str]:
    """Which sizes cannot be free, by name, and why.

    Raises:
        CaptureError: torch.export cannot follow the model at all.
    """
    found = {}
    for name in free.names:
        with _places() as places:
            captured = capture(model, *example, dynamic_batch=True, free=free.only([name]))
        if name not in captured.free:
            where = f": it is fixed at {places[-1]}" if places else ""
            found[name] = (
                f"{name} cannot be free: the model's code is for {free.sizes(example)[name]} "
                f"alone{where}. Leave it out of dynamic_shapes, or let the code read the size off "
                "the tensor there (x.shape) instead of having a number."
            )
    return found


@contextmanager
def _places() -> Iterator[list[str]]:
    """The lines of the user's code at which torch takes symbols for numbers, within the context."""
    places: list[str] = []
    replace = getattr(ShapeEnv, "_set_replacement", None)
    if replace is None:  # a torch that has it otherwise; then no line is said
        yield places
        return

    @functools.wraps(replace)
    def noted(env: Any, symbol: Any, value: Any, *rest: Any, **named: Any) -> Any:
        if getattr(value, "is_number", False):
            stack = traceback.extract_stack()
            lines = [frame for frame in stack if not _is_library(frame.filename)]
            if lines:
                place = f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}"
                places.append(f'{place}, "{lines[-1].line}"')
        return replace(env, symbol, value, *rest, **named)

    with mock.patch.object(ShapeEnv, "_set_replacement", noted):
        yield places


def _is_library(file: str) -> bool:
    parents = Path(file).parents
    return _OWN in parents or _LIBRARY in parents or file.startswith("<") or "unittest" in file
