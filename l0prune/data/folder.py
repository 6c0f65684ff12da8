"""Folders of images, one folder for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from l0prune.data.dataset import Data, Loaded
from l0prune.errors import DataError

# What torchvision's networks were trained with: mean and deviation of each channel of ImageNet.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SIZE = 224
_BORDER = 256 / 224  # how much larger an image is before its middle is cut out
_MOST_WORKERS = 8


def image_folder(spec: str, rest: str) -> Data:
    """``DIR`` or ``DIR:PIXELS``, with ``train`` and ``test`` or ``val`` inside.

    Images are cut to squares of that size and scaled as for ImageNet; augmented, training images
    are random parts of the originals, mirrored or not.

    Raises:
        DataError: a folder is missing or empty, or the parts hold different classes.
    """
    name, _, pixels = rest.rpartition(":")
    folder, size = (Path(name), int(pixels)) if name and pixels.isdigit() else (Path(rest), _SIZE)
    train_folder, test_folder = _parts(folder)
    fixed, varied = _transforms(max(size, 1))
    train, test = _read(train_folder, fixed), _read(test_folder, fixed)
    if train.classes != test.classes:
        raise DataError(
            f"{folder}: train and {test_folder.name} hold different classes "
            f"({', '.join(sorted(set(train.classes) ^ set(test.classes))[:5])})."
        )
    workers = min(_processors(), _MOST_WORKERS)
    augmented = _read(train_folder, varied)
    return Data(spec, Loaded(train, workers, augmented), Loaded(test, workers), len(train.classes))


def _parts(folder: Path) -> tuple[Path, Path]:
    """The folders of training and test images."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. imagefolder:DIR needs DIR/train and DIR/test.")
    tests = [folder / part for part in ("test", "val") if (folder / part).is_dir()]
    if not (folder / "train").is_dir() or not tests:
        raise DataError(
            f"{folder} needs two folders, train and test (or val), each with one folder per class."
        )
    return folder / "train", tests[0]


def _transforms(size: int) -> tuple[Any, Any]:
    from torchvision import transforms as T

    scale = [T.ToTensor(), T.Normalize(_MEAN, _STD)]
    fixed = T.Compose([T.Resize(round(size * _BORDER)), T.CenterCrop(size), *scale])
    varied = T.Compose([T.RandomResizedCrop(size), T.RandomHorizontalFlip(), *scale])
    return fixed, varied


def _read(folder: Path, transform: Any) -> Any:
    from torchvision import datasets

    try:
        return datasets.ImageFolder(str(folder), transform)
    except OSError as error:
        raise DataError(f"{folder} needs one folder of images per class: {error}") from error


def _processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
