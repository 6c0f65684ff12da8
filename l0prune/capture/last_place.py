"""Numbers moved by one unit in the last place, by which the size of float32 rounding is measured.

A network with such weights and inputs is as right in float32 as the network itself. So an error as
large as its difference from the exact answer shows nothing but rounding. Rounding moves a number by
half a unit at most, and by less on average, so that this difference is on the large side.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUNS = 4  # moved networks, of which the largest error counts
TIMES = 2  # an error of more times the rounding is a fault: two networks round


def moved(tensor: Tensor, seed: int) -> Tensor:
    """Return the values in float32, each moved up or down at random by a unit in the last place.

    Whole numbers stay: they may be indices, counts or masks. So does what would become infinite.
    """
    single = tensor.detach().float()
    generator = torch.Generator().manual_seed(seed)
    is_up = torch.randint(2, single.shape, generator=generator).bool().to(single.device)
    limits = torch.where(is_up, float("inf"), float("-inf")).to(single)
    near = torch.nextafter(single, limits)
    return torch.where((single == single.round()) | ~near.isfinite(), single, near)
