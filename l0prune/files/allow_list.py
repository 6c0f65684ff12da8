"""Allow list for pickled models: the permitted names, and checks of the loaded objects.

The author of a file chooses what is called and with which arguments. So the list holds classes
that only compute (nn.Modules of torch and torchvision), activations, and nothing that reaches an
attribute by name, a file or an interpreter. And none of them is called: an ordinary pickle makes
empty modules and sets their state, while a call of a class or function can allocate any memory.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.capture.threads import muted
from l0prune.doors import behind
from l0prune.files.around import AROUND

# Packages whose nn.Module classes an ordinary pickled model names.
_PACKAGES = ("torch.nn.modules", "torchvision.models", "torchvision.ops")
# Module classes that hold code as data, and run it.
_CODE = (torch.fx.GraphModule, torch.jit.ScriptModule)
# Activations that modules keep as plain functions. Calling one does nothing but arithmetic.
_ACTIVATIONS = (
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid mish relu "
    "relu6 selu sigmoid silu softmax softplus softsign tanh tanhshrink"
)


class StandIn:
    """Placeholder for a class or function while a pickle is read, which refuses to be called.

    For a module class it makes empty instances, as unpickling does. ``resolved`` replaces it by
    the real object.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        if isinstance(real, type):
            # The unpickler makes instances by cls.__new__(cls), whatever cls is.
            vars(self)["__new__"] = lambda _, *arguments: _empty(real)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse the call."""
        raise UnpicklingError(f"a call of {self.real.__name__}, which no ordinary pickle makes")

    def __eq__(self, other: object) -> bool:
        # The unpickler checks whether an instance's class is among the permitted ones.
        return other is self or other is self.real

    def __hash__(self) -> int:
        return hash(self.real)


def resolved(value: Any) -> Any:
    """Replace every stand-in in a value, also in nested tuples, by the real object."""
    if isinstance(value, StandIn):
        return value.real
    if type(value) is tuple and value:
        parts = tuple(map(resolved, value))
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    return value


def _empty(cls: type[nn.Module]) -> nn.Module:
    """Make an instance without attributes, whose state can be set once."""
    made = cls.__new__(cls)
    vars(made)["__setstate__"] = functools.partial(_take_state, made)
    return made


def _take_state(module: nn.Module, state: Any) -> None:
    del vars(module)["__setstate__"]
    if type(state) is not dict:
        raise UnpicklingError(f"a {type(module).__name__} whose state is no dict")
    if isinstance(module, nn.RNNBase):
        # Its __setstate__ loops over num_layers, which may be any number.
        layers, weights = state.get("num_layers"), state.get("_parameters")
        if not isinstance(layers, int) or not isinstance(weights, dict) or layers > len(weights):
            raise UnpicklingError(f"a {type(module).__name__} with more layers than weights")
    module.__setstate__(state)  # type: ignore[operator]


class ModulePartial(functools.partial):
    """``functools.partial`` of an nn.Module class; a ViT keeps its norm layer's class as one.

    Pickled or copied it becomes an ordinary partial again.
    """

    def __new__(cls, func: Any, /, *args: Any, **keywords: Any) -> ModulePartial:
        """Make the partial, or raise UnpicklingError if ``func`` is no nn.Module class."""
        return super().__new__(cls, _module_class(func), *resolved(args), **_values(keywords))

    def __setstate__(self, state: Any) -> None:
        func, args, keywords, attributes = state
        state = (_module_class(func), resolved(args), _values(keywords), attributes)
        super().__setstate__(state)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.func, self.args, self.keywords, self.__dict__ or None)
        return functools.partial, (self.func,), state


def _module_class(found: Any) -> type[nn.Module]:
    found = resolved(found)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise UnpicklingError(f"functools.partial of {found!r}")


def _values(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: resolved(value) for name, value in keywords.items()}


def allowed(name: str) -> Any | None:
    """Return the object for the global ``name`` of a pickle; None where it is not allowed."""
    if name in _helpers():
        return _helpers()[name]
    for package in _PACKAGES:
        if name.startswith(f"{package}."):
            return _module_classes(package).get(name)
    return _of_features(name)


@functools.cache
def _helpers() -> dict[str, Any]:
    functions = [getattr(F, name) for name in _ACTIVATIONS.split()]
    names = {f"{f.__module__}.{f.__qualname__}": StandIn(f) for f in functions}
    return {**names, "functools.partial": ModulePartial}


@functools.cache
def _of_features(name: str) -> StandIn | None:
    """Return a class of what a feature puts around networks; no other feature is imported."""
    for key, feature in behind("around"):
        if name.startswith(f"{feature.package}.") and not AROUND[key].has_hooks:
            for each in (AROUND[key], *AROUND[key].ordinary):
                if name == f"{each.__module__}.{each.__qualname__}":
                    return StandIn(each)
    return None


@functools.cache
def _module_classes(package: str) -> dict[str, StandIn]:
    """Return the nn.Module classes defined in the package, except ``_CODE``, by full name."""
    found: dict[str, type[nn.Module]] = {}
    with muted():  # warnings of deprecated modules that the file may not name
        root = importlib.import_module(package)
        names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
        modules = [root, *map(importlib.import_module, names)]
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, type) and issubclass(value, nn.Module):
            found[f"{value.__module__}.{value.__qualname__}"] = value
    return {
        name: StandIn(cls)
        for name, cls in found.items()
        if name.startswith(f"{package}.") and not issubclass(cls, _CODE)
    }


_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
# Hooks of tensors that are called with gradients. No pickle of torch's has one.
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MAX_NAMES, _MAX_DEPTH = 10**6, 200
# Tensors may share their memory, so that their sizes add up to more than the file's.
_SHARING, _ALWAYS = 8, 64 * 2**20


def check_ordinary(found: Any, length: int) -> None:
    """Refuse hooks, attributes that shadow those of classes, and objects of excessive size.

    Permitted parts could be combined into a harmful whole; ordinary modules are not.
    Stand-ins for classes are replaced by the classes, in place.

    Tensors that repeat a few entries over and over may not be much larger than ``length``, the
    bytes of the file.

    Raises:
        UnpicklingError: there is such an object somewhere in ``found``.
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
    """Replace stand-ins by their classes in a module, tensor, dict or list, in place."""
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
    """Return the bytes that the value takes, or would take after a copy."""
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
        return (*value, *value.values(), *getattr(value, "__dict__", {}).values())
    return value if isinstance(value, list | tuple | set) else ()


def _check_names(value: Any) -> None:
    """Refuse attributes that shadow a method of the class, and callables that shadow anything.

    For example, ``_compiled_call_impl`` of ``nn.Module`` is None; else it is called for forwards.
    """
    if not isinstance(value, nn.Module | Tensor | ModulePartial | dict | list | set):
        return  # functions and classes, which come from the allow list
    for name, own in getattr(value, "__dict__", {}).items():
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
            is_name = isinstance(name, str) and name.isprintable()  # terminals interpret the rest
            if not is_name or not (entry is None or isinstance(entry, wanted)):
                yield f"entry {name!r} in {table}"


def _check_tree(modules: list[nn.Module]) -> None:
    """Refuse a module inside itself, too deep nesting, and too many names by shared modules."""
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
