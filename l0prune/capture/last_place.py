"""Numbers moved by one unit in the last place, by which the size of float32 rounding is measured.

A network with such weights, inputs and results is as right in float32 as the network itself. So an
error as large as its difference from the exact answer shows nothing but rounding. Rounding moves a
number by half a unit at most, and by less on average, so that this difference is on the large side.
Results are moved apart from each other, since a difference of two that are nearly equal, such as
the variance as E[x²] - E[x]², rounds far more than any change of the weights shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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

    Whole numbers stay: they may be indices, counts or masks. So do infinities.
    """
    single = tensor.detach().float()
    start, size = seed * _STRIDE % _SIGNS, single.numel()
    signs = _signs()[start:]
    if size > len(signs):
        signs = signs.repeat(-(-size // len(signs)))
    steps = signs[:size].view(single.shape).to(single.device)
    steps = steps.masked_fill(single == single.round(), 0)
    return (single.view(torch.int32) + steps).view(torch.float32)


_SIGNS = (1 << 20) + 7  # a prime, so that they repeat at no size of a matrix
_STRIDE = 0x9E3779B1  # takes successive seeds to places far apart


@cache
def _signs() -> Tensor:
    """Return random signs, twice in a row, so that as many follow each of the first ones."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_SIGNS,), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).repeat(2)


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
