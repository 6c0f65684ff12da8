"""What an ordinary model looks like inside, once it is unpickled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.files.allow_list import ModulePartial, StandIn, resolved

_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
# Of tensors: functions that are called with their gradients. No pickle of torch's has one.
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MAX_NAMES, _MAX_DEPTH = 10**6, 200
# Tensors may share their memory, so that all together look larger than the file.
_SHARING, _ALWAYS = 8, 64 * 2**20


def check_ordinary(found: Any, length: int) -> None:
    """Refuse hooks, attributes in place of what classes define, and bombs.

    Harmless parts, wired up cleverly, could become a harmful whole; ordinary modules are not.
    Stand-ins for classes are replaced by the classes, in place.

    Args:
        found: what was unpickled.
        length: of its file, in bytes: tensors that repeat a few entries over and over may not
            be much larger.

    Raises:
        UnpicklingError: there is such a module somewhere in ``found``.
    """
    seen: dict[int, Any] = {}
    waiting = [found]
    size = 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        _check_names(value)
        _resolve(value)
        if isinstance(value, nn.Module):
            _check_module(value)
        if isinstance(value, Tensor) and any(getattr(value, name, None) for name in _OF_GRADIENTS):
            raise UnpicklingError("a tensor with hooks")
        size += _size(value)
        waiting.extend(_parts(value))
    if size > _SHARING * length + _ALWAYS:
        raise UnpicklingError(f"{size:,} bytes of tensors in a file of {length:,}")
    _check_tree([value for value in seen.values() if isinstance(value, nn.Module)])


def _resolve(value: Any) -> None:
    """Put the classes in place of their stand-ins, in a module, a dict or a list."""
    table = vars(value) if isinstance(value, nn.Module | Tensor) else value
    if isinstance(table, dict):
        for key, entry in list(table.items()):
            if isinstance(key, StandIn):
                raise UnpicklingError("a class as a key")
            if isinstance(entry, StandIn | tuple):
                table[key] = resolved(entry)
    elif isinstance(table, list):
        table[:] = map(resolved, table)


def _size(value: Any) -> int:
    """What the value takes, or would take once it is copied; in bytes."""
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not value.is_meta
        return value.numel() * value.element_size() if is_dense else 0
    if isinstance(value, torch.UntypedStorage):
        return value.nbytes()
    return len(value) if isinstance(value, bytes | bytearray) else 0


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module | Tensor):
        return vars(value).values()
    if isinstance(value, ModulePartial):
        return (*value.args, *value.keywords.values(), *vars(value).values())
    if isinstance(value, dict):
        return (*value, *value.values(), *_attributes(value).values())
    return value if isinstance(value, list | tuple | set) else ()


def _attributes(value: Any) -> dict[Any, Any]:
    """Return what an object holds under names; a dict of its own class can, too."""
    return getattr(value, "__dict__", {})


def _check_names(value: Any) -> None:
    """Refuse what stands in the place of a method, or a function where the class has anything.

    Of ``nn.Module`` ``_compiled_call_impl`` is None, and is called instead of ``forward`` if not.
    """
    if not isinstance(value, nn.Module | Tensor | ModulePartial | dict | list | set):
        return  # functions and classes, which come from here
    for name, own in _attributes(value).items():
        is_taken = hasattr(type(value), str(name))
        if is_taken and (callable(own) or callable(getattr(type(value), str(name)))):
            raise UnpicklingError(f"a {type(value).__name__} with a {name} of its own")


def _check_module(module: nn.Module) -> None:
    state = vars(module)
    kind = type(module).__name__
    for name in (*_TABLES, *(n for n in _HOOKS if n in state)):
        if type(state.get(name)) not in (dict, OrderedDict):
            raise UnpicklingError(f"a {kind} whose {name} is no dict")
    if any(state.get(name) for name in _HOOKS):
        raise UnpicklingError(f"a {kind} with hooks")
    wrong = next(_wrong_entries(state), None)
    if wrong is not None:
        raise UnpicklingError(f"a {kind} with an unusable {wrong}")
    if type(state.get("_non_persistent_buffers_set", set())) is not set:
        raise UnpicklingError(f"a {kind} whose names of buffers are no set")


def _wrong_entries(state: dict[str, Any]) -> Iterator[str]:
    for table, wanted in zip(_TABLES, (nn.Module, nn.Parameter, Tensor), strict=True):
        for name, entry in state[table].items():
            is_name = isinstance(name, str) and name.isprintable()  # terminals obey the rest
            if not is_name or not (entry is None or isinstance(entry, wanted)):
                yield f"entry {name!r} in {table}"


def _check_tree(modules: list[nn.Module]) -> None:
    """Refuse a module inside itself, and endless names: of shared modules, or modules so deep."""
    names: dict[int, int] = {}
    heights: dict[int, int] = {}
    for module in modules:
        open_: dict[int, nn.Module] = {}
        waiting = [module]
        while waiting:
            current = waiting[-1]
            children = [c for c in current._modules.values() if c is not None]
            if id(current) in names:
                waiting.pop()
            elif id(current) not in open_:
                open_[id(current)] = current
                if any(id(child) in open_ and id(child) not in names for child in children):
                    raise UnpicklingError("a module inside itself")
                waiting.extend(child for child in children if id(child) not in names)
            else:
                waiting.pop()
                tensors = len(current._parameters) + len(current._buffers)
                names[id(current)] = 1 + tensors + sum(names[id(c)] for c in children)
                heights[id(current)] = 1 + max((heights[id(c)] for c in children), default=0)
                if heights[id(current)] > _MAX_DEPTH:
                    raise UnpicklingError(f"modules more than {_MAX_DEPTH} levels deep")
                if names[id(current)] > _MAX_NAMES:
                    raise UnpicklingError(f"a model with more than {_MAX_NAMES:,} names")
