"""What small images are varied by at random while a network trains, on whole batches at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# As CIFAR networks are trained, and as far as digits may be off the middle.
BORDER, NARROW_BORDER = 4, 2


def shifted_and_mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to 4 pixels over a border of zeros, and mirrored or not.

    Shape: ``(n, channels, height, width)``, in and out.
    """
    padded = F.pad(images, (BORDER,) * 4)
    rows, columns = _window(images, BORDER, generator)
    mirrored = _draw(len(images), 2, generator).bool().to(images.device)
    return _cut_out(padded, rows, torch.where(mirrored, columns.flip(1), columns))


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to 2 pixels; what comes in is like the edge.

    Shape: ``(n, channels, height, width)``, in and out.
    """
    padded = F.pad(images, (NARROW_BORDER,) * 4, mode="replicate")
    return _cut_out(padded, *_window(images, NARROW_BORDER, generator))


def _window(images: Tensor, border: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For each image the rows and the columns of a padded one that it is to show."""
    count, _, height, width = images.shape
    rows, columns = (
        _draw(count, 2 * border + 1, generator).to(images.device)
        + torch.arange(length, device=images.device)
        for length in (height, width)
    )
    return rows, columns


def _draw(count: int, below: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, below, (count, 1), generator=generator)


def _cut_out(padded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Of each padded image these rows, ``(n, height)``, and these columns, ``(n, width)``."""
    which = torch.arange(len(padded), device=padded.device)[:, None, None]
    chosen = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2).contiguous()
