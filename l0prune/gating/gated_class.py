"""Dynamic subclasses of the user's module classes, in which parameters read as gated.

A property on the class is a data descriptor, which Python asks before ``nn.Module.__getattr__``.
So reading ``module.weight`` returns the gated tensor, functional use included, while
``_parameters``, and with it state_dict, optimizers and wrappers, keeps the original. A buffer that
is added to a stream, such as a table of positions, is read in the same way. Code outside the
model's forward gets a ``Computed``: reads are gated, writes go to the parameter.

``torch.func.functional_call`` replaces parameters for one call. Tensors passed to a call of the
whole model are its weights, and are gated: fast weights, ensembles. Tensors that the model's
forward puts into one of its modules are used unchanged, as the survey saw them: these gates do not
belong to them. For a module called by itself neither can be known, so a UsageError is raised.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import without_torch_function
from l0prune.errors import UsageError
from l0prune.gating.gated_layer import forward_of
from l0prune.gating.link import Link, acting_link
from l0prune.gating.multiplying import LINK, held

_CONVERTED = (
    "a layer is being made from the parameters of a gated one, as "
    "nn.SyncBatchNorm.convert_sync_batchnorm, quantisation and adapters do, and its gates would "
    "stay behind: convert first, and gate the model then. Take the gates off (l0prune.ungate), "
    "convert, and gate it again; or convert the exported model."
)

# Attributes of the parameter itself, not of the product.
_OF_THE_PARAMETER = {"grad", "requires_grad", "data", "is_leaf"}


class Computed(Tensor):
    """The product of a parameter and its gates, which passes writes on to the parameter.

    Code that initialises, clamps or freezes ``module.weight`` means the parameter: an in-place
    operation on this tensor, its ``grad``, its ``data`` and its ``requires_grad`` are those of
    the parameter. All other operations use the product and return ordinary tensors.
    """

    _l0prune_parameter: Tensor

    @staticmethod
    def of(product: Tensor, parameter: Tensor) -> Computed:
        """Return the product, linked to the parameter or buffer that it was computed from."""
        result = product.as_subclass(Computed)
        result._l0prune_parameter = parameter
        return result

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function on the product, or on the parameter if ``_is_for_the_parameter``."""
        kwargs = kwargs or {}
        if func in _ASKED_OF_IT and _becomes_a_parameter():
            raise UsageError(_CONVERTED)
        with without_torch_function():
            target = next(iter((*args, *kwargs.values())), None)  # torch.nn.init gives it by name
            if isinstance(target, Computed) and _is_for_the_parameter(func):
                parameter = target._l0prune_parameter
                args = tuple(parameter if arg is target else arg for arg in args)
                kwargs = {k: parameter if arg is target else arg for k, arg in kwargs.items()}
            return func(*args, **kwargs)


def _becomes_a_parameter() -> bool:
    """Return whether torch is turning the product into a parameter, or rejecting it as one.

    torch has no hook for this. ``nn.Parameter(…)`` calls ``detach()``, and the assignment to a
    parameter reads the type's name for its error message; both callers are known code objects.
    """
    caller = sys._getframe(2)  # of __torch_function__
    if caller.f_code is torch.typename.__code__ and caller.f_back is not None:
        return caller.f_back.f_code in _ASSIGN
    return caller.f_code is nn.Parameter.__new__.__code__


def _is_for_the_parameter(func: Callable[..., Any]) -> bool:
    """Return whether the function writes, or reads or sets an attribute of the parameter itself."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _OF_THE_PARAMETER
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE)
    return name.endswith("_")


# Functions that torch calls on a tensor that is to be a parameter, and where it calls them.
_ASKED_OF_IT = (Tensor.type, Tensor.detach)
_ASSIGN = (nn.Module.__setattr__.__code__, nn.Module.register_parameter.__code__)
_AUGMENTED = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
)
_IN_PLACE = {f"__i{name}__" for name in _AUGMENTED} | {"__ilshift__", "__irshift__"}


_Names = tuple[str, ...]
_classes: dict[tuple[type[nn.Module], _Names, _Names, bool], type[nn.Module]] = {}

CHILD = "l0prune_gates"  # name of the bank among the model's submodules
QUANTIZER = "l0prune_int8"  # key of the hooks of fake quantization
# Where the bank's hooks are kept; the last one has the forward hook called after errors, too.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")

_TAKEN = (
    "something would take the place of {0}.{1}, which is gated: pruning, weight_norm and the like "
    "of torch.nn.utils keep a weight under other names, where its gates do not reach it. Put them "
    "on before l0prune.gate, or on the exported model."
)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module, gated or not."""
    return getattr(type(module), "_l0prune_original", type(module))


def gating_of(module: nn.Module) -> tuple[_Names, _Names, bool]:
    """Return the arguments of ``gated_class`` after the original class, for this module."""
    return getattr(type(module), "_l0prune_arguments", ((), (), False))


def is_gated(module: nn.Module) -> bool:
    """Return whether the module itself reads gated parameters, or holds the bank."""
    return hasattr(type(module), "_l0prune_original") or CHILD in module._modules


def gated_class(
    original: type[nn.Module], names: _Names, lists: _Names, holds_bank: bool
) -> type[nn.Module]:
    """Return the subclass of ``original`` in which the tensors called ``names`` read as gated.

    Attributes called ``lists``, which hold some of them, read as gated, too. With ``holds_bank`` a
    compiled forward computes all multipliers and products first, in the graph that reads them, a
    container hides the bank from its contents, and a class with a custom copy (an FX graph) keeps
    its hooks. If nothing has to change the result is ``original``; equal arguments give the same
    class.
    """
    if not names and not holds_bank:
        return original
    key = (original, names, lists, holds_bank)
    if key not in _classes:
        _classes[key] = _make_class(*key)
    return _classes[key]


def _make_class(
    original: type[nn.Module], names: _Names, lists: _Names, holds_bank: bool
) -> type[nn.Module]:
    members: dict[str, Any] = {name: _gated_tensor(name) for name in names}
    members |= {name: _gated_list(name) for name in lists}
    if "weight" in names and (forward := forward_of(original)) is not None:
        members |= {"forward": forward, "_l0prune_casts": True}  # may read in autocast's dtype
    if holds_bank:
        members["forward"] = _traced_whole(members.get("forward", original.forward))
    if holds_bank and hasattr(original, "__len__"):
        members |= _container_methods(original, gated_class(original, names, lists, False))
    if hasattr(original, "__deepcopy__"):
        members["__deepcopy__"] = _deepcopy
    if "_wrapped_call" in vars(original):  # FX compiles a graph into its class, and again to pickle
        members["_wrapped_call"] = vars(original)["_wrapped_call"]
    members |= {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "register_parameter": _register_parameter,
        "_l0prune_original": original,
        "_l0prune_arguments": (names, lists, holds_bank),
    }
    metaclass: Any = type(original)
    result: type[nn.Module] = metaclass(original.__name__, (original,), members)
    return result


def _traced_whole(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that calls the bank itself while compiling, as hooks do otherwise.

    ``torch.compile(model)`` runs hooks outside the graph of the forward. Products of weights that
    are computed there are views of one tensor, and for each view autograd builds a gradient of the
    whole tensor.
    """

    @wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or CHILD not in self._modules:
            return forward(self, *args, **kwargs)
        gates: Any = self._modules[CHILD]
        gates.begin_forward(self)
        result = forward(self, *args, **kwargs)
        gates.end_forward()
        return result

    return run


def _register_parameter(module: nn.Module, name: str, param: Any) -> None:
    """Register a parameter as torch does, but refuse tensors that are no parameters."""
    if isinstance(param, Tensor) and not isinstance(param, nn.Parameter):
        raise UsageError(_TAKEN.format(type(module).__name__, name.removesuffix("_orig")))
    original_class(module).register_parameter(module, name, param)


def _gated_tensor(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        is_buffer = name in module._buffers
        if not is_buffer and name not in module._parameters:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        stored = held(module, name)
        link = acting_link(module, name, stored)
        if stored is None or link is None:
            return stored
        result = stored
        if name in link.sites or name in link.scales:
            result = link.product(name, stored, stored.dtype)
        if link.quantizes(name):
            assert link.quantizer is not None
            result = link.quantizer.weight(result, link.layer)
        if result is stored:
            return stored
        # A forward writes into no parameter; into a buffer it may, in training mode.
        if torch.compiler.is_compiling() or (link.gates.in_forward and not is_buffer):
            return result
        return Computed.of(result, stored)

    def write(module: nn.Module, value: Any) -> None:
        raise UsageError(_TAKEN.format(type(module).__name__, name))

    return property(read, write, doc=f"The tensor ``{name}``, multiplied by its gates.")


def _gated_list(name: str) -> property:
    def read(module: nn.Module) -> list[Any]:
        if name not in module.__dict__:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        kept: list[Any] = module.__dict__[name]
        link: Link | None = module.__dict__.get(LINK)
        if link is None or link.gates.bypassed:
            return kept
        mine = link.lists[name]
        if mine.given is not None:
            return mine.given
        pairs = zip(mine.plain(module, kept), mine.names, strict=False)
        return [getattr(module, own) if own in link.sites else entry for entry, own in pairs]

    def write(module: nn.Module, value: list[Any]) -> None:
        link: Link | None = module.__dict__.get(LINK)
        if link is not None:
            mine = link.lists[name]
            mine.given, value = None if link.gates.bypassed else value, mine.plain(module, value)
        module.__dict__[name] = value

    return property(read, write, doc=f"The list ``{name}``, with parameters as the module's are.")


def _container_methods(
    original: type[nn.Module], without_bank: type[nn.Module]
) -> dict[str, Callable[..., Any]]:
    """Return methods of a container (such as Sequential) that hide the bank from its contents."""

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
    """Pickle as the original class does, and gate the module again when it is unpickled."""
    original = original_class(self)
    reduced: Any = original.__reduce_ex__(self, protocol)
    rebuild, arguments, *state = reduced
    arguments = tuple(original if a is type(self) else a for a in arguments)
    gating = _Gating.of(self)
    if any(state):  # the state contains link and hooks
        gating = _Gating(gating.arguments, None, {})
    return (_rebuild, (rebuild, arguments, gating), *state)


def _rebuild(
    rebuild: Callable[..., nn.Module], arguments: tuple[Any, ...], gating: _Gating
) -> nn.Module:
    module = rebuild(*arguments)
    gating.put_on(module)
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy as the original class does, and gate the copy alike."""
    result: nn.Module = original_class(self).__deepcopy__(self, memo)  # type: ignore[attr-defined]
    copy.deepcopy(_Gating.of(self), memo).put_on(result)
    return result


@dataclass(frozen=True, slots=True)
class _Gating:
    """Class arguments, link and hooks that make one module gated.

    A class with a custom copy or pickle loses them: an FX graph is rebuilt from its code, as a
    plain graph without hooks.
    """

    arguments: tuple[_Names, _Names, bool]
    link: Link | None
    hooks: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Gating:
        hooks = {name: getattr(module, name)[CHILD] for name in HOOKS if CHILD in module._modules}
        return cls(gating_of(module), module.__dict__.get(LINK), hooks)

    def put_on(self, module: nn.Module) -> None:
        module.__class__ = gated_class(original_class(module), *self.arguments)
        if self.link is not None:
            module.__dict__[LINK] = self.link
        for name, hook in self.hooks.items():
            getattr(module, name)[CHILD] = hook
