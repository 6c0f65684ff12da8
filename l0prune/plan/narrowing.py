"""Layouts of what is left of a network when slots are cut out of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from l0prune.plan.layout import Both, Cat, Const, Layout, Pick, Prod, Slots, picked


def narrowed(layout: Layout, kept: Callable[[int], Tensor]) -> tuple[Layout, Tensor]:
    """The layout of the positions that stay, and which do.

    Args:
        layout: of some positions.
        kept: by the number of an axis which of its slots stay, bool.

    Returns:
        The layout of those that stay, in their order, and a mask over the positions, bool, shape
        ``(size_of(layout),)``.
    """
    match layout:
        case Const(size):
            return layout, torch.ones(size, dtype=torch.bool)
        case Slots(axis, start, stop):
            stays = kept(axis)
            first, count = int(stays[:start].sum()), int(stays[start:stop].sum())
            return Slots(axis, first, first + count), stays[start:stop]
        case Cat(parts):
            layouts, masks = zip(*(narrowed(part, kept) for part in parts), strict=True)
            return Cat(layouts), torch.cat(masks)
        case Prod(factors):
            whole = torch.ones(1, dtype=torch.bool)
            left = []
            for factor in factors:
                own, mask = narrowed(factor, kept)
                left.append(own)
                whole = (whole[:, None] & mask).flatten()
            return Prod(tuple(left)), whole
        case Both(base, fine):
            (coarse, of_base), (finer, of_fine) = narrowed(base, kept), narrowed(fine, kept)
            both = of_base & of_fine
            return Both(those(coarse, of_base, both), those(finer, of_fine, both)), both
        case Pick(base, index):
            own, mask = narrowed(base, kept)
            at = torch.tensor(index, dtype=torch.int64)
            stays = mask[at]
            return picked(own, _numbers(mask, at[stays])), stays


def those(layout: Layout, mask: Tensor, wanted: Tensor) -> Layout:
    """The positions ``wanted`` of a layout of those in ``mask``; both bool over all of them."""
    assert not (wanted & ~mask).any(), "what is wanted has been cut"
    if torch.equal(mask, wanted):
        return layout
    return picked(layout, _numbers(mask, wanted.nonzero().flatten()))


def _numbers(mask: Tensor, positions: Tensor) -> tuple[int, ...]:
    """Return the rank of positions among those in ``mask``."""
    return tuple((mask.cumsum(0) - 1)[positions].tolist())
