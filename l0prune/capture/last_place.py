"""Numbers moved by one unit in the last place, by which the size of float32 rounding is measured.

A network with such weights, inputs and results is as right in float32 as the network itself. So an
error as large as its difference from the exact answer shows nothing but rounding. Rounding moves a
number by half a unit at most, and by less on average, so that this difference is on the large side.
Results are moved apart from each other, since a difference of two that are nearly equal, such as
the variance as E[x²] - E[x]², rounds far more than any change of the weights shows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from l0prune.capture.compat import pytree

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


class MovedResults(TorchFunctionMode):
    """Context in which the float32 results of torch's functions are moved, each call's apart.

    Views of operands, and operands written in place, are returned as they are.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seeds = count(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs))}

        def near(leaf: Any) -> Any:
            place = _memory(leaf)
            is_new = place is not None and leaf.dtype == torch.float32 and place not in known
            return moved(leaf, next(self._seeds)) if is_new else leaf

        is_result = isinstance(found, Tensor | tuple | list)
        return pytree.tree_map(near, found) if is_result else found


def _memory(leaf: Any) -> int | None:
    """Return where a tensor's values are; None for what is none of torch's own, or sparse."""
    is_dense = type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided
    return leaf.untyped_storage().data_ptr() if is_dense else None
