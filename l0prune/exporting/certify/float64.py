"""Running a model in float64 throughout, also where its code asks for something less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from l0prune.exporting.certify.quantisation import in_float64

_LESS = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)
_LESS |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)


class InFloat64(TorchDispatchMode):
    """Within the context, whoever asks for a floating-point dtype gets float64.

    Many networks cast to float32 inside (``hidden.to(torch.float32)`` before a norm). In a
    comparison in float64 that would show rounding where an error of the cut is looked for.
    """

    supports_higher_order_operators = True  # torch.cond chooses one of its branches, as it does

    def __enter__(self) -> InFloat64:
        """Also what is made without a dtype (``torch.ones(8)``) is float64 from here."""
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """The default dtype is what it was."""
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator in float64, or its complex numbers, where the dtype is a smaller one."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LESS:
            kwargs["dtype"] = _LESS[kwargs["dtype"]]
        return in_float64(func)(*args, **kwargs)
