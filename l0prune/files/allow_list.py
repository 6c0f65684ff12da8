"""What the pickle of an ordinary model may name.

Whoever made the file chooses what is called and with which arguments. So the list holds classes
that only compute (nn.Modules of torch and torchvision), activations, and nothing that reaches an
attribute by name, a file or an interpreter. And none of it is called: an ordinary pickle makes
empty modules and fills them in, while a call of a class or function allocates what it likes.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from l0prune.capture.quiet import quietly

# Packages whose nn.Module classes an ordinary pickled model names.
_PACKAGES = ("torch.nn.modules", "torchvision.models", "torchvision.ops")
# Modules that hold code as data, and run it.
_CODE = (torch.fx.GraphModule, torch.jit.ScriptModule)
# Activations that modules keep as plain functions. Calling one does nothing but arithmetic.
_ACTIVATIONS = (
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid mish relu "
    "relu6 selu sigmoid silu softmax softplus softsign tanh tanhshrink"
)


class StandIn:
    """Stands for a class or function while a pickle is read: it can be named, but not called.

    Of a module class it makes empty instances, as unpickling does. ``resolved`` puts the real
    thing in its place.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        if isinstance(real, type):
            # The unpickler makes instances by cls.__new__(cls), whatever cls is.
            vars(self)["__new__"] = lambda _, *arguments: _empty(real)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse.

        Raises:
            UnpicklingError: always.
        """
        raise UnpicklingError(f"a call of {self.real.__name__}, which no ordinary pickle makes")

    def __eq__(self, other: object) -> bool:
        # The unpickler asks whether an instance's class is among those that it was given.
        return other is self or other is self.real

    def __hash__(self) -> int:
        return hash(self.real)


def resolved(value: Any) -> Any:
    """The value with every stand-in in it, also deep in tuples, replaced by what it stands for."""
    if isinstance(value, StandIn):
        return value.real
    if type(value) is tuple and value:
        parts = tuple(map(resolved, value))
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    return value


def _empty(cls: type[nn.Module]) -> nn.Module:
    """An instance without anything, which takes its state once."""
    made = cls.__new__(cls)
    vars(made)["__setstate__"] = functools.partial(_take_state, made)
    return made


def _take_state(module: nn.Module, state: Any) -> None:
    del vars(module)["__setstate__"]
    if type(state) is not dict:
        raise UnpicklingError(f"a {type(module).__name__} whose state is no dict")
    if isinstance(module, nn.RNNBase):
        # Unpickling works through its layers one by one, as many as it says it has.
        layers, weights = state.get("num_layers"), state.get("_parameters")
        if not isinstance(layers, int) or not isinstance(weights, dict) or layers > len(weights):
            raise UnpicklingError(f"a {type(module).__name__} with more layers than weights")
    module.__setstate__(state)  # type: ignore[operator]


class ModulePartial(functools.partial):
    """``functools.partial`` of an nn.Module class; a ViT keeps its norm layer's class as one.

    Pickled or copied it becomes an ordinary partial again.
    """

    def __new__(cls, func: Any, /, *args: Any, **keywords: Any) -> ModulePartial:
        """As for ``functools.partial``."""
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
    """The object that stands for the global ``name`` of a pickle; None where it is not allowed."""
    if name in _helpers():
        return _helpers()[name]
    for package in _PACKAGES:
        if name.startswith(f"{package}."):
            return _module_classes(package).get(name)
    return None


@functools.cache
def _helpers() -> dict[str, Any]:
    functions = [getattr(F, name) for name in _ACTIVATIONS.split()]
    names = {f"{f.__module__}.{f.__qualname__}": StandIn(f) for f in functions}
    return {**names, "functools.partial": ModulePartial}


@functools.cache
def _module_classes(package: str) -> dict[str, StandIn]:
    """Every nn.Module class that is defined inside the package itself, by its full name."""
    found: dict[str, type[nn.Module]] = {}
    with quietly():  # of deprecated corners that the file may never mention
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
