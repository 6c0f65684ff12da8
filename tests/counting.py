"""Counts by torch itself."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops(model: nn.Module, x: torch.Tensor) -> int:
    # Without the fused fast path of nn.MultiheadAttention, which the counter does not see into, and
    # with attention as two products: up to torch 2.14 it does not see into a CPU's other kernel.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    attention = sdpa_kernel(SDPBackend.MATH)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), attention:
            model.eval()(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops()
