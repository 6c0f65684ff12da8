"""Folders of images, one folder for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from l0prune.data.dataset import Data, Loaded
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import DataError

_SIZE = 224
_BORDER = 256 / 224  # shorter side of an image over the side of the square that is cut out of it
_MOST_WORKERS = 8


def image_folder(spec: str, rest: str) -> Data:
    """``DIR`` or ``DIR:PIXELS``, with ``train`` and ``test`` or ``val`` inside.

    Images become squares of that size (224 where none is given) as torchvision's networks take
    them: the shorter side is resized to 256/224 of it, and the middle is cut out; see
    ``Preprocessing``. Augmented, training images are random parts of the originals, resized to
    it, mirrored or not.

    Raises:
        DataError: a folder is missing or empty, or the parts hold different classes.
    """
    name, _, pixels = rest.rpartition(":")
    folder, size = (Path(name), int(pixels)) if name and pixels.isdigit() else (Path(rest), _SIZE)
    train_folder, test_folder = _parts(folder)
    preprocessing = for_imagenet(max(size, 1))
    train, test = (_read(part, preprocessing.transform()) for part in (train_folder, test_folder))
    if train.classes != test.classes:
        raise DataError(
            f"{folder}: train and {test_folder.name} hold different classes "
            f"({', '.join(sorted(set(train.classes) ^ set(test.classes))[:5])})."
        )
    workers = min(_processors(), _MOST_WORKERS)
    augmented = _read(train_folder, _varied(preprocessing))
    return Data(
        spec,
        Loaded(train, workers, augmented),
        Loaded(test, workers),
        len(train.classes),
        preprocessing,
    )


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


def for_imagenet(size: int) -> Preprocessing:
    """Return the preprocessing that torchvision's networks were trained with, at a size."""
    resize = round(size * _BORDER)
    return Preprocessing(
        input_size=[3, size, size],
        color="RGB",
        resize=resize,
        interpolation="bilinear",
        crop_pct=size / resize,
        crop_mode="center",
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
    )


def _varied(preprocessing: Preprocessing) -> Any:
    from torchvision import transforms as T

    crop = T.RandomResizedCrop(preprocessing.input_size[1])
    return T.Compose([crop, T.RandomHorizontalFlip(), *preprocessing.to_input()])


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
