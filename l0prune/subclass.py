"""Dynamic subclasses of a user's module classes, in which reading a parameter gives it gated.

A property on the class is a data descriptor, which Python asks before ``nn.Module.__getattr__``.
So whoever reads ``module.weight`` gets the gated tensor, functional use included, while
``_parameters``, and with it state_dict, optimizers and wrappers, keeps the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.gates.bank import Gates
from l0prune.gates.computed import Computed
from l0prune.gates.current import Multiplier
from l0prune.gates.scale import scale

_classes: dict[tuple[type[nn.Module], tuple[str, ...], bool], type[nn.Module]] = {}

CHILD = "l0prune_gates"  # the name under which a model holds its bank
LINK = "_l0prune"  # the attribute by which a module finds the bank


@dataclass(slots=True)
class Link:
    """How a gated module finds its gates; no nn.Module, so that it is nobody's child.

    Attributes:
        gates: the model's bank.
        sites: for each gated parameter of the module, what multiplies it along which dim.
    """

    gates: Gates
    sites: dict[str, tuple[tuple[Multiplier, int], ...]]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The user's own class of a module, gated or not."""
    return getattr(type(module), "_l0prune_original", type(module))


def is_gated(module: nn.Module) -> bool:
    """Does this very module read gated parameters, or hold the bank?"""
    return hasattr(type(module), "_l0prune_original") or CHILD in module._modules


def gated_class(
    original: type[nn.Module], names: tuple[str, ...], holds_bank: bool
) -> type[nn.Module]:
    """The subclass of ``original`` in which the parameters called ``names`` read as gated.

    With ``holds_bank`` a container leaves the bank out of what it contains. Where nothing has
    to change it is ``original`` itself, and modules alike get the same class.
    """
    contains = holds_bank and hasattr(original, "__len__")
    if not names and not contains:
        return original
    key = (original, names, contains)
    if key not in _classes:
        _classes[key] = _make_class(*key)
    return _classes[key]


def _make_class(
    original: type[nn.Module], names: tuple[str, ...], contains: bool
) -> type[nn.Module]:
    members: dict[str, Any] = {name: _gated_parameter(name) for name in names}
    if contains:
        members |= _container_methods(original, gated_class(original, names, False))
    members |= {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "_l0prune_original": original,
        "_l0prune_arguments": (names, contains),
    }
    metaclass: Any = type(original)
    result: type[nn.Module] = metaclass(original.__name__, (original,), members)
    return result


def _gated_parameter(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        parameter = module._parameters[name]
        link: Link | None = module.__dict__.get(LINK)
        if parameter is None or link is None or link.gates.bypassed:
            return parameter
        if not link.gates.in_forward and hasattr(parameter, "placements"):
            return parameter  # FSDP2 asks for the shard that it keeps between the forwards
        link.gates.refresh()
        result: Tensor = parameter
        for multiplier, dim in link.sites[name]:
            assert multiplier.values is not None
            result = scale(result, multiplier.values, dim)
        if link.gates.in_forward or torch.compiler.is_compiling():
            return result
        return Computed.of(result, parameter)

    return property(read, doc=f"The parameter ``{name}``, multiplied by its gates.")


def _container_methods(
    original: type[nn.Module], without_bank: type[nn.Module]
) -> dict[str, Callable[..., Any]]:
    """Methods of a container (a Sequential, say) that leave the bank out of its contents."""

    def iterate(self: nn.Module) -> Iterator[Any]:
        for item in original.__iter__(self):  # type: ignore[attr-defined]
            if not (item is self._modules.get(CHILD) or item == CHILD):
                yield item

    def length(self: nn.Module) -> int:
        return int(original.__len__(self)) - (CHILD in self._modules)  # type: ignore[attr-defined]

    def asked_without_bank(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any) -> Any:
            contents = {k: m for k, m in self._modules.items() if k != CHILD}
            view = object.__new__(without_bank)
            view.__dict__ = {**self.__dict__, "_modules": contents}
            return getattr(view, name)(*args)

        return method

    methods: dict[str, Callable[..., Any]] = {"__iter__": iterate, "__len__": length}
    methods |= {n: asked_without_bank(n) for n in ("__getitem__", "keys", "values", "items")}
    return {name: method for name, method in methods.items() if hasattr(original, name)}


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle as the original class would, and put the gated class on when it is back."""
    original = original_class(self)
    gated_as: tuple[Any, ...] = type(self)._l0prune_arguments  # type: ignore[attr-defined]
    reduced: Any = original.__reduce_ex__(self, protocol)
    rebuild, arguments, *state = reduced
    arguments = tuple(original if a is type(self) else a for a in arguments)
    return (_rebuild, (original, gated_as, rebuild, arguments), *state)


def _rebuild(
    original: type[nn.Module],
    gated_as: tuple[tuple[str, ...], bool],
    rebuild: Callable[..., nn.Module],
    arguments: tuple[Any, ...],
) -> nn.Module:
    module = rebuild(*arguments)
    module.__class__ = gated_class(original, *gated_as)
    return module
