"""What the pickle of an ordinary model may name, and what an ordinary model looks like inside.

Whoever made the file chooses what is called and with which arguments. So the list holds classes
that only compute (nn.Modules of torch and torchvision), activations, and nothing that reaches an
attribute by name, a file or an interpreter; and what was built from them must not have methods or
hooks of its own.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pickle import UnpicklingError
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

# Packages whose nn.Module classes an ordinary pickled model names.
_PACKAGES = ("torch.nn.modules", "torchvision.models", "torchvision.ops")
# Activations that modules keep as plain functions. Calling one does nothing but arithmetic.
_ACTIVATIONS = (
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid mish relu "
    "relu6 selu sigmoid silu softmax softplus softsign tanh tanhshrink"
)
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


class ModulePartial(functools.partial):
    """``functools.partial`` of an nn.Module class; a ViT keeps its norm layer's class as one.

    Pickled or copied it becomes an ordinary partial again.
    """

    def __new__(cls, func: Any, /, *args: Any, **keywords: Any) -> ModulePartial:
        """As for ``functools.partial``."""
        _check_is_module_class(func)
        return super().__new__(cls, func, *args, **keywords)

    def __setstate__(self, state: Any) -> None:
        _check_is_module_class(state[0])
        super().__setstate__(state)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.func, self.args, self.keywords, self.__dict__ or None)
        return functools.partial, (self.func,), state


def _check_is_module_class(found: Any) -> None:
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UnpicklingError(f"functools.partial of {found!r}")


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
    names = {f"{f.__module__}.{f.__qualname__}": f for f in functions}
    return {**names, "functools.partial": ModulePartial}


@functools.cache
def _module_classes(package: str) -> dict[str, type[nn.Module]]:
    """Every nn.Module class that is defined inside the package itself, by its full name."""
    found: dict[str, type[nn.Module]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated corners that the file may never mention
        root = importlib.import_module(package)
        names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
        modules = [root, *map(importlib.import_module, names)]
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, type) and issubclass(value, nn.Module):
            found[f"{value.__module__}.{value.__qualname__}"] = value
    return {name: cls for name, cls in found.items() if name.startswith(f"{package}.")}


def check_ordinary(found: Any) -> None:
    """Refuse modules with hooks, or with attributes in place of their class's methods.

    Harmless parts, wired up cleverly, could become a harmful whole; ordinary modules are not.

    Raises:
        UnpicklingError: there is such a module somewhere in ``found``.
    """
    seen: set[int] = set()
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            _check_module(value)
        waiting.extend(_parts(value))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return vars(value).values()
    if isinstance(value, ModulePartial):
        return (*value.args, *value.keywords.values(), *vars(value).values())
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple | set) else ()


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
    for name in state:
        if callable(getattr(type(module), str(name), None)):
            raise UnpicklingError(f"a {kind} with a {name} of its own")


def _wrong_entries(state: dict[str, Any]) -> Iterator[str]:
    for table, wanted in zip(_TABLES, (nn.Module, nn.Parameter, Tensor), strict=True):
        for name, entry in state[table].items():
            if not isinstance(name, str) or not (entry is None or isinstance(entry, wanted)):
                yield f"entry {name!r} in {table}"
