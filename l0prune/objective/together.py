"""Slots that are cut in whole blocks learn in whole blocks.

Where widths come in multiples of eight, a layer that gates have left three maps gets eight in the
end, and others pay for it, late and by no loss. So slots that are cut together have one log α
between them, and one block of each axis counts as if it were sure to stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from l0prune.plan.plan import Plan


class Together:
    """The blocks of all axes. A block is made of slots that matter about as much.

    Attributes:
        numbers: of the block that each slot is in, shape ``(plan.size,)``.

    Args:
        plan: of the network.
        blocks: for each axis, how many slots open and close together.
        worth: by which slots are put beside each other; shape ``(plan.size,)``. The blocks are kept
            where it is.
    """

    def __init__(self, plan: Plan, blocks: Sequence[int], worth: Tensor) -> None:
        order = worth.detach().cpu()
        numbers, axes = (torch.zeros(plan.size, dtype=torch.long) for _ in range(2))
        stays = torch.zeros(plan.size, dtype=torch.bool)
        for number, (axis, block) in enumerate(zip(plan.axes, blocks, strict=True)):
            ranks = order[axis.slice].argsort(descending=True, stable=True).argsort()
            numbers[axis.slice] = axis.start + ranks // block
            axes[axis.slice] = number
            stays[axis.slice] = block > 1 and number not in plan.closing
        self._count = len(plan.axes)
        self.numbers, self._axes, self._stays = numbers, axes, stays
        self._sizes = numbers.bincount(minlength=plan.size)[numbers]
        self.move(worth.device)

    def move(self, device: torch.device) -> None:
        """Keep the blocks there, so that no step has to bring them."""
        self.numbers, self._axes = self.numbers.to(device), self._axes.to(device)
        self._stays, self._sizes = self._stays.to(device), self._sizes.to(device)

    def mean(self, values: Tensor) -> Tensor:
        """For each slot the mean of its block; shape ``(plan.size,)``."""
        sums = torch.zeros_like(values).index_add(0, self.numbers, values)
        return sums[self.numbers] / self._sizes

    def least(self, p: Tensor) -> Tensor:
        """Return ``p`` with 1 for the block of each axis that is likeliest to stay open.

        Axes that may close completely, and those without blocks, are as they were.
        """
        now = p.detach()
        most = now.new_zeros(self._count).scatter_reduce(0, self._axes, now, "amax")[self._axes]
        return torch.where(self._stays & (now >= most), 1.0, p)
