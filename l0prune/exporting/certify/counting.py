"""Multiply-accumulates of a forward, as torch counts them, attention on a CPU included."""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from l0prune.capture.compat import TorchDispatchMode
from l0prune.capture.example_inputs import examples_given
from l0prune.capture.sizes import Inputs


class MacsCounter(FlopCounterMode):
    """Context that counts the multiply-accumulates of one forward.

    torch has no count for its attention on a CPU.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={_ATTENTION: _flops_of_attention})

    def for_one(self, inputs: Inputs) -> float:
        """Return the multiply-accumulates for one example of these inputs."""
        macs: float = self.get_total_flops() / 2 / examples_given(inputs)
        return macs


class MacsSeen(TorchDispatchMode):
    """Context that counts the same on a run whose result is needed, and changes nothing of it.

    A ``FlopCounterMode`` returns the first branch of each condition. What runs inside of conditions
    and loops is not counted here.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._formulas, self._flops = MacsCounter().flop_registry, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run inside, which ``flex_attention`` requires."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and add its operations."""
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            with suppress(Exception):  # a formula for other shapes: then the run counts too little
                self._flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def for_one(self, inputs: Inputs) -> float:
        """Return the multiply-accumulates for one example of these inputs."""
        return self._flops / 2 / examples_given(inputs)


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _flops_of_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the operations of attention by the shapes of queries, keys and values."""
    flops: int = 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return flops
