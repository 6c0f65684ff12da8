"""Caches of ``functools.lru_cache``, which must give no tensors to a trace, nor keep any of it.

A tensor that was cached before is a constant of the captured graph, in the dtype and with the size
of that call. One that is cached in a trace has no values, and the model's next call would get it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_CACHED: Any = type(functools.lru_cache(lambda: None))
_DEEPEST = 4  # containers between a cache and a tensor: its entries, and tuples or dicts in these


@contextmanager
def without_cached_tensors() -> Iterator[None]:
    """Clear the caches that hold tensors, before and after the context."""
    functions = [each for each in gc.get_referrers(_CACHED) if type(each) is _CACHED]
    own = [each for each in functions if not str(each.__module__).startswith("torch.")]
    _clear(own)
    try:
        yield
    finally:
        _clear(own)


def _clear(functions: list[Any]) -> None:
    for function in functions:
        if function.cache_info().currsize and _holds_tensor(gc.get_referents(function)):
            function.cache_clear()


def _holds_tensor(values: list[Any], deep: int = 0) -> bool:
    if any(isinstance(value, Tensor) for value in values):
        return True
    inner = [value for value in values if gc.is_tracked(value) and _is_container(value)]
    return deep < _DEEPEST and any(_holds_tensor(gc.get_referents(v), deep + 1) for v in inner)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
