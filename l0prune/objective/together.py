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
        worth: by which slots are put beside each other; shape ``(plan.size,)``.
    """

    def __init__(self, plan: Plan, blocks: Sequence[int], worth: Tensor) -> None:
        self.numbers = torch.zeros(plan.size, dtype=torch.long)
        self._axis = torch.zeros(plan.size, dtype=torch.long)
        self._stays = torch.zeros(plan.size, dtype=torch.bool)
        for number, (axis, block) in enumerate(zip(plan.axes, blocks, strict=True)):
            ranks = worth[axis.slice].cpu().argsort(descending=True, stable=True).argsort()
            self.numbers[axis.slice] = axis.start + ranks // block
            self._axis[axis.slice] = number
            self._stays[axis.slice] = block > 1 and number not in plan.closing
        self._count = len(plan.axes)

    def mean(self, values: Tensor) -> Tensor:
        """For each slot the mean of its block; shape ``(plan.size,)``."""
        numbers = self.numbers.to(values.device)
        zeros = torch.zeros_like(values)
        counts = zeros.index_add(0, numbers, torch.ones_like(values))
        return (zeros.index_add(0, numbers, values) / counts.clamp_min(1))[numbers]

    def least(self, p: Tensor) -> Tensor:
        """The same chances to be open, but 1 for the block of each axis that is likeliest to stay.

        Axes that may close completely, and those without blocks, are as they were.
        """
        axis, stays = self._axis.to(p.device), self._stays.to(p.device)
        of_axes = p.new_zeros(self._count)
        most = of_axes.scatter_reduce(0, axis, p.detach(), "amax")[axis]
        return torch.where(stays & (p.detach() >= most), 1.0, p)
