"""The small sets that everybody knows, whole in memory: digits, MNIST and its like, CIFAR."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from l0prune.capture.quiet import printing_to
from l0prune.data.augment import shifted, shifted_and_mirrored
from l0prune.data.dataset import Augmentation, Data, Tensors
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import DataError


def _as_they_are(
    color: Literal["RGB", "L"],
    side: int,
    mean: list[float],
    std: list[float],
    pixel_max: float = 255.0,
) -> Preprocessing:
    """Return the preprocessing of squares that keep their size."""
    shape = [len(color), side, side]
    return Preprocessing(input_size=shape, color=color, pixel_max=pixel_max, mean=mean, std=std)


_CIFAR = _as_they_are("RGB", 32, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
# torchvision's class, and what its images become.
_KNOWN = {
    "mnist": ("MNIST", _as_they_are("L", 28, [0.1307], [0.3081])),
    "fashion-mnist": ("FashionMNIST", _as_they_are("L", 28, [0.2860], [0.3530])),
    "cifar10": ("CIFAR10", _CIFAR),
    "cifar100": ("CIFAR100", _CIFAR),
}
_DIGITS = _as_they_are("L", 8, [0.5], [0.5], pixel_max=16.0)  # from −1 to 1
_DIGITS_TRAIN = 1437  # four of five


def digits(name: str, root: Path) -> Data:
    """1,797 handwritten digits of 8×8 pixels that scikit-learn brings along, from −1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("The digits come with scikit-learn: pip install 'l0prune[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    inputs = _DIGITS.scaled(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8))
    targets = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    learned, tested = (Tensors(inputs[part], targets[part]) for part in (train, test))
    return Data(name, learned, tested, 10, _DIGITS)


def mnist(name: str, root: Path) -> Data:
    """Images of 28×28 pixels in ten classes: handwritten digits, or clothes."""
    sets = [_torchvision(name, root, train) for train in (True, False)]
    train, test = (_scaled(name, found.data[:, None], found.targets, shifted) for found in sets)
    return Data(name, train, test, 10, _KNOWN[name][1])


def cifar(name: str, root: Path) -> Data:
    """Colour images of 32×32 pixels; CIFAR-10 also as JPEG files packed in ``cifar10-jpeg``."""
    classes = 100 if name == "cifar100" else 10
    packed = root / "cifar10-jpeg"
    if name == "cifar10" and (packed / "train.npz").exists():
        pairs = [_unpacked(packed / f"{part}.npz") for part in ("train", "test")]
    else:
        sets = [_torchvision(name, root, train) for train in (True, False)]
        pairs = [(torch.from_numpy(found.data), torch.tensor(found.targets)) for found in sets]
    train, test = (
        _scaled(name, images.permute(0, 3, 1, 2), labels, shifted_and_mirrored)
        for images, labels in pairs
    )
    return Data(name, train, test, classes, _KNOWN[name][1])


def _torchvision(name: str, root: Path, train: bool) -> Any:
    """A torchvision dataset; downloaded only where it is not there yet."""
    from torchvision import datasets

    build = getattr(datasets, _KNOWN[name][0])
    failure: Exception | None = None
    for download in (False, True):
        try:
            with printing_to(sys.stderr):  # stdout is for results
                return build(str(root), train=train, download=download)
        except Exception as error:  # torchvision raises whatever its parsers meet
            failure = error
    raise DataError(
        f"{name} can neither be read from {root} nor downloaded to it ({failure}). Say where it is "
        "with --data-root DIR or the environment variable L0PRUNE_DATA."
    ) from failure


def _scaled(name: str, images: Tensor, labels: Tensor, augmentation: Augmentation) -> Tensors:
    """Bytes to floats of about zero mean and unit deviation.

    Shape: images ``(n, channels, height, width)``, uint8.
    """
    return Tensors(_KNOWN[name][1].scaled(images), labels.to(torch.int64), augmentation)


def _unpacked(path: Path) -> tuple[Tensor, Tensor]:
    """Images packed as JPEG files one after another (arrays jpeg, length, label).

    Shape: images ``(n, height, width, channels)``, uint8; labels ``(n,)``.
    """
    try:
        with path.open("rb") as archive, np.load(archive) as arrays:
            jpeg, lengths, labels = arrays["jpeg"], arrays["length"], arrays["label"]
        files = np.split(jpeg, np.cumsum(lengths)[:-1])
        pixels = [np.asarray(Image.open(io.BytesIO(file.tobytes()))) for file in files]
        images = torch.from_numpy(np.stack(pixels))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is missing or damaged: {error}") from error
    return images, torch.from_numpy(labels)
