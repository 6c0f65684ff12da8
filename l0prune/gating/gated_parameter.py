"""A gated parameter as code outside the model's forward sees it: gated to read, plain to write.

A gated buffer looks so in the forward, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from l0prune.capture.compat import without_torch_function

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
        with without_torch_function():
            target = next(iter((*args, *kwargs.values())), None)  # torch.nn.init gives it by name
            if isinstance(target, Computed) and _is_for_the_parameter(func):
                parameter = target._l0prune_parameter
                args = tuple(parameter if arg is target else arg for arg in args)
                kwargs = {k: parameter if arg is target else arg for k, arg in kwargs.items()}
            return func(*args, **kwargs)


def _is_for_the_parameter(func: Callable[..., Any]) -> bool:
    """Return whether the function writes, or reads or sets an attribute of the parameter itself."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _OF_THE_PARAMETER
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE)
    return name.endswith("_")


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
