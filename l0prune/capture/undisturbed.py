"""Restoration of all that a traced forward leaves in a model and in the code of its classes.

While torch.export traces a forward, its tensors are fake; while a copy runs for a comparison, they
are of another dtype, or of the smaller sizes. A forward may keep them: in attributes, in containers
and objects there, in attributes of its class, in globals of its code, or in a
``functools.lru_cache``. It may register hooks, too, as models of transformers do at the first call
that asks for hidden states, and remember that in an attribute: one without the other makes the next
forward register them twice, so that it collects every hidden state twice.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.model_checks import evaluating

_CONTAINERS = (OrderedDict, dict, list, set, deque)
_CACHED_FUNCTION = type(functools.lru_cache(len))
_ATOMS = (str, bytes, int, float, bool, complex, type(None), Tensor, nn.Parameter)
_CODE = (ModuleType, FunctionType, type)
_NOT_THE_USERS = {"torch", "numpy", "l0prune", *sys.stdlib_module_names}


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the attributes, containers, hooks and caches of a model after the context."""
    before = [(each, _contents(each)) for each in _containers(model.modules())]
    try:
        with code_undisturbed(model):
            yield
    finally:
        for container, contents in before:
            _refill(container, contents)


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of all buffers after the context."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients, and restore the model with its state after the context."""
    with undisturbed(model), same_buffers(model), evaluating(model):
        yield


@contextmanager
def code_undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore what the code of a model's classes keeps, and no state of the model itself."""
    named = [(owner, _values(owner)) for owner in _code_of(model)]
    values = [value for _, of_owner in named for value in of_owner.values()]
    objects = (value for value in values if not isinstance(value, _CONTAINERS))
    kept = [*values, *filter(None, map(_attributes, objects))]
    before = [(each, _contents(each)) for each in _containers(kept, opens=False)]
    functions = [each for each in values if isinstance(each, _CACHED_FUNCTION)]
    misses = [each.cache_info().misses for each in functions]
    try:
        yield
    finally:
        for container, contents in before:
            _refill(container, contents)
        for owner, of_owner in named:
            _rename(owner, of_owner)
        for function, count in zip(functions, misses, strict=True):
            if function.cache_info().misses != count and _holds_tensor(function):
                function.cache_clear()


def _code_of(model: nn.Module) -> list[Any]:
    """Return the classes of a model's modules, their Python modules, and those that these use."""
    classes = dict.fromkeys(
        each for module in model.modules() for each in type(module).__mro__ if _is_users(each)
    )
    places = dict.fromkeys(sys.modules[each.__module__] for each in classes)
    for place in [*places]:
        for value in vars(place).values():
            found = value if isinstance(value, ModuleType) else _place_of(value)
            if found is not None and _is_users(found):
                places.setdefault(found)
    return [*classes, *places]


def _place_of(value: Any) -> ModuleType | None:
    """Return the Python module that defines a function or a class; None for other values."""
    if not isinstance(value, FunctionType | type | _CACHED_FUNCTION):
        return None
    return sys.modules.get(value.__module__ or "")


def _is_users(value: Any) -> bool:
    """Return whether a class, or a Python module, is in neither torch nor Python's own library."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return name in sys.modules and name.partition(".")[0] not in _NOT_THE_USERS


def _values(owner: Any) -> dict[str, Any]:
    """Return the values of a class or Python module by name, without code."""
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("__") and not isinstance(value, _CODE)
    }


def _rename(owner: Any, before: dict[str, Any]) -> None:
    """Give the names of a class or Python module their values from before."""
    now = _values(owner)
    for name in now.keys() - before.keys():
        delattr(owner, name)
    for name, value in before.items():
        if now.get(name, owner) is not value:
            setattr(owner, name, value)


def _containers(roots: Iterable[Any], opens: bool = True) -> Iterator[Any]:
    """Yield every container that these values reach, with ``opens`` also through attributes."""
    pending, seen = [*roots], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            yield value
        if isinstance(value, (*_CONTAINERS, tuple)):
            pending += (each for each in _contents(value) if type(each) not in _ATOMS)
        if opens and (attributes := _attributes(value)) is not None:
            pending.append(attributes)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a module or of an object of the user's own class."""
    is_object = isinstance(value, nn.Module) or (
        not isinstance(value, (*_CODE, Tensor)) and _is_users(type(value))
    )
    held = getattr(value, "__dict__", None) if is_object else None
    return held if type(held) is dict else None


def _base(container: Any) -> Any:
    """Return the type of Python whose methods read and fill a container, or an heir of it."""
    return next(kind for kind in (*_CONTAINERS, tuple) if isinstance(container, kind))


def _contents(container: Any) -> list[Any]:
    """Return the contents of a container in order; of a dict its keys, then its values."""
    base = _base(container)
    if isinstance(container, dict):
        return [*base.keys(container), *base.values(container)]
    return [*base.__iter__(container)]


def _refill(container: Any, contents: list[Any]) -> None:
    """Give a container its contents from before, if these are others now."""
    now, base = _contents(container), _base(container)
    if len(now) == len(contents) and all(map(operator.is_, now, contents)):
        return
    base.clear(container)
    if isinstance(container, dict):
        half = len(contents) // 2
        base.update(container, zip(contents[:half], contents[half:], strict=True))
    elif isinstance(container, set):
        base.update(container, contents)
    else:
        base.extend(container, contents)


def _holds_tensor(cached: Any) -> bool:
    """Return whether a function's cache holds a tensor."""
    pending, seen = gc.get_referents(cached), set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            return True
        is_inside = type(value) in (*_CONTAINERS, tuple) or type(value).__module__ == "functools"
        if is_inside and id(value) not in seen:
            seen.add(id(value))
            pending += gc.get_referents(value)
    return False
