"""Running a model in one dtype throughout, also where its code asks for something less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from l0prune.capture.compat import TorchDispatchMode
from l0prune.capture.quiet import alone
from l0prune.exporting.certify.quantisation import in_float64
from l0prune.exporting.slicing.dtypes import lifted


class InOneDtype(TorchDispatchMode):
    """Within the context, whoever asks for a smaller floating-point dtype gets this one.

    Many networks cast inside: to float32 before a norm, to bfloat16 under ``torch.autocast``. A
    comparison would show the rounding of those casts where an error of the cut is looked for; and
    with weights in this dtype, an operator would be given two.
    """

    supports_higher_order_operators = True  # torch.cond chooses one of its branches, as it does

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run inside: ``flex_attention`` cannot do without it."""
        return True

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype`` is float64 or float32."""
        super().__init__()
        self._dtype = dtype
        self._lifted = lifted(dtype)

    def __enter__(self) -> InOneDtype:
        """Let what is made without a dtype (``torch.ones(8)``) be of this one, too.

        That is a setting of the process, so that threads take turns.
        """
        self._turn = alone()
        self._turn.__enter__()
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(self._lifted.get(self._default, self._default))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Put the default dtype back."""
        super().__exit__(*error)
        torch.set_default_dtype(self._default)
        self._turn.__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator in this dtype, or its complex numbers, where it asks for a smaller."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in self._lifted:
            kwargs["dtype"] = self._lifted[kwargs["dtype"]]
        operator = in_float64(func) if self._dtype == torch.float64 else func
        return operator(*args, **kwargs)
