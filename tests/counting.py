"""Counts by torch itself."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def flops(model: nn.Module, x: torch.Tensor) -> int:
    # Without the fused fast path of nn.MultiheadAttention, which the counter does not see into.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops()
