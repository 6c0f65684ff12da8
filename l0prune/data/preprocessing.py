"""Preprocessing and augmentation of images, from the pixels of a file to a network's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict
from torch import Tensor

from l0prune.files.checked_json import Strict


class Preprocessing(Strict):
    """Preprocessing of an image into a network's input, at test time.

    In this order: colours, resize, crop, pixel values over ``pixel_max``, minus ``mean``, over
    ``std``. Names are those of timm's data configuration, where it has them.

    Attributes:
        input_size: channels, height and width of an input.
        color: ``RGB`` or ``L`` (grey), the order of channels, as PIL converts to.
        resize: pixels of the shorter side after resizing, the other side in proportion, rounded
            down; None where images keep their size. It changes no image that has this size.
        interpolation: of the resizing, as PIL does it (antialiased).
        crop_pct: height of the crop, over ``resize``.
        crop_mode: place of the crop.
        pixel_max: largest value of a pixel, which becomes 1.
        mean, std: mean and deviation of each channel, of values from 0 to 1.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    input_size: list[int]
    color: Literal["RGB", "L"]
    resize: int | None = None
    interpolation: Literal["bilinear"] | None = None
    crop_pct: float | None = None
    crop_mode: Literal["center"] | None = None
    pixel_max: float = 255.0
    mean: list[float]
    std: list[float]

    def scaled(self, pixels: Tensor) -> Tensor:
        """Return pixel values as inputs; floats are changed in place.

        Shape: ``(n, channels, height, width)``, in and out.
        """
        inputs = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (self.mean, self.std))
        return inputs.div_(self.pixel_max).sub_(mean).div_(std)

    def transform(self) -> Any:
        """Return the torchvision transform of a PIL image in ``color``."""
        from torchvision import transforms as T

        resize = T.Resize(self.resize, T.InterpolationMode(self.interpolation))
        return T.Compose([resize, T.CenterCrop(self.input_size[1:]), *self.to_input()])

    def to_input(self) -> list[Any]:
        """Return the last steps of ``transform``, from bytes (0 to 255) to the input."""
        from torchvision import transforms as T

        return [T.ToTensor(), T.Normalize(self.mean, self.std)]

    def __str__(self) -> str:
        _, height, width = self.input_size
        size = f"{height}×{width} pixels"
        if self.resize is not None:
            change = (
                f"shorter side resized to {self.resize} pixels ({self.interpolation}, "
                f"antialiased), middle {size} cut out"
            )
            is_whole = self.resize == height == width
            size = f"{size} as they are (others: {change})" if is_whole else change
        return (
            f"{self.color} images, {size}, values over {self.pixel_max:g}, minus mean "
            f"{_listed(self.mean)}, over deviation {_listed(self.std)}"
        )


def _listed(numbers: Sequence[float]) -> str:
    return "(" + ", ".join(f"{number:g}" for number in numbers) + ")"


# Pixels: the usual border for CIFAR, and a narrower one for digits, which are centred.
_BORDER, _NARROW_BORDER = 4, 2


def shifted_and_mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image at random by up to 4 pixels, padding with zeros, and mirror it or not.

    Shape: ``(n, channels, height, width)``, in and out.
    """
    padded = F.pad(images, (_BORDER,) * 4)
    rows, columns = _window(images, _BORDER, generator)
    mirrored = _draw(len(images), 2, generator).bool().to(images.device)
    return _cut_out(padded, rows, torch.where(mirrored, columns.flip(1), columns))


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image at random by up to 2 pixels, padding with edge pixels.

    Shape: ``(n, channels, height, width)``, in and out.
    """
    padded = F.pad(images, (_NARROW_BORDER,) * 4, mode="replicate")
    return _cut_out(padded, *_window(images, _NARROW_BORDER, generator))


def _window(images: Tensor, border: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw for each image the rows and columns of a random crop of the padded image."""
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
    """Crop each padded image to its rows, ``(n, height)``, and columns, ``(n, width)``."""
    which = torch.arange(len(padded), device=padded.device)[:, None, None]
    chosen = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2).contiguous()
