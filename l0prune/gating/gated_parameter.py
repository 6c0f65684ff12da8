"""A gated parameter as code outside the model's forward sees it: gated to read, plain to write.

A gated buffer looks so in the forward, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import without_torch_function
from l0prune.errors import UsageError

_CONVERTED = (
    "a layer is being made from the parameters of a gated one, as "
    "nn.SyncBatchNorm.convert_sync_batchnorm, quantisation and adapters do, and its gates would "
    "stay behind: convert first, and gate the model then. Take the gates off (l0prune.ungate), "
    "convert, and gate it again; or convert the exported model."
)

# What belongs to the parameter itself, not to its value at this moment.
_OF_THE_PARAMETER = {"grad", "requires_grad", "data", "is_leaf"}


class Computed(Tensor):
    """The product of a parameter and its gates, which hands on to the parameter what is written.

    Code that initialises, clamps or freezes ``module.weight`` means the parameter: an in-place
    operation on this tensor, its ``grad``, its ``data`` and its ``requires_grad`` are those of
    the parameter. All else works on the product, and gives ordinary tensors.
    """

    _l0prune_parameter: Tensor

    @staticmethod
    def of(product: Tensor, parameter: Tensor) -> Computed:
        """The product, with the parameter or buffer that it was computed from."""
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
        """Run an operation on the product, or on the parameter if it writes or is the latter's."""
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
    """Return whether torch is about to make a parameter of the product, or to refuse it as one.

    torch has no hook for that. ``nn.Parameter(…)`` asks for ``detach()``, and the assignment to a
    parameter asks for the type's name to say that a product is none; both call from known code.
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


# What torch asks of a tensor that is to be a parameter, and where.
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
