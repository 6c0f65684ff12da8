"""The augmentation that CIFAR networks are trained with, on whole batches at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BORDER = 4


def shifted_and_mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to 4 pixels over a border of zeros, and mirrored or not.

    Shape: ``(n, channels, height, width)``, in and out.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (BORDER,) * 4)

    def draw(most: int) -> Tensor:
        return torch.randint(0, most, (count, 1), generator=generator).to(images.device)

    rows = draw(2 * BORDER + 1) + torch.arange(height, device=images.device)
    columns = draw(2 * BORDER + 1) + torch.arange(width, device=images.device)
    columns = torch.where(draw(2).bool(), columns.flip(1), columns)
    which = torch.arange(count, device=images.device)[:, None, None]
    chosen = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2).contiguous()
