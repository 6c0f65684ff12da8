"""Multiply-accumulates of a forward, as torch counts them, attention on a CPU included."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

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


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _flops_of_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the operations of attention by the shapes of queries, keys and values."""
    flops: int = 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return flops
