"""Caches of ``functools.lru_cache``, which must give no tensors to a trace, nor keep any of it.

A tensor that was cached before is a constant of the captured graph, in the dtype and with the size
of that call. One that is cached in a trace has no values, and the model's next call would get it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_CACHED: Any = type(functools.lru_cache(lambda: None))
_DEEPEST = 4  # containers between a cache and a tensor: its entries, and tuples or dicts in these


@contextmanager
def without_cached_tensors(model: nn.Module) -> Iterator[None]:
    """Clear the caches that hold tensors, before and after the context.

    They are those of functions and methods of all imported modules, and of the model's attributes.
    """
    functions = [*dict.fromkeys(_cached_functions(model))]  # each is in many modules
    _clear(functions)
    try:
        yield
    finally:
        _clear(functions)


def _clear(functions: list[Any]) -> None:
    for function in functions:
        if function.cache_info().currsize and _holds_tensor(gc.get_referents(function)):
            function.cache_clear()


def _cached_functions(model: nn.Module) -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _WITHOUT and isinstance(module, type(sys)):
            yield from _in(vars(module), name)
    for part in model.modules():
        yield from _in(vars(part), "")


def _in(names: Mapping[str, Any], module: str) -> Iterator[Any]:
    for value in list(names.values()):
        value = getattr(value, "__func__", value) if type(value) in _METHODS else value
        if type(value) is _CACHED:
            yield value
        elif isinstance(value, type) and value.__module__ == module:
            yield from _in(vars(value), "")


_METHODS = (staticmethod, classmethod)
_WITHOUT = {"torch", *sys.stdlib_module_names} - {"__main__"}


def _holds_tensor(values: list[Any], deep: int = 0) -> bool:
    if any(isinstance(value, Tensor) for value in values):
        return True
    inner = [value for value in values if isinstance(value, dict | list | tuple)]
    return deep < _DEEPEST and any(_holds_tensor(gc.get_referents(v), deep + 1) for v in inner)
