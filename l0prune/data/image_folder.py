"""Data source of images in folders, one folder per class, or of images alone."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from l0prune.data.dataset import Data, Loaded
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import DataError
from l0prune.progress.stages import steps

SPEC = re.compile(r"(.+?)(?::(?:([13])x)?(\d+))?", re.DOTALL)  # folder, channels, size
_SIZE = 224
_BORDER = 256 / 224  # shorter side of a resized image over the side of its square crop
_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
)  # what torchvision reads
_SAMPLE = 64  # about as many images whose size is read
_MOST_WORKERS = 8
_WORTH_A_WORKER = 64  # images that take as long to read as a process takes to start
_FIFTH = 5  # one in this many images is for the test if there is no test folder
_MOST = 1_024  # images without labels that are read: these are all in memory


def image_folder(spec: str, rest: str) -> Data | Tensor:
    """Return the images of ``DIR``, ``DIR:PIXELS`` or, in grey, ``DIR:1xPIXELS``.

    They are in ``train`` and ``test`` or ``val``; without any of these, every fifth image of each
    class is a test image. Of a folder of images alone the inputs are returned, of at most 1,024
    images from all over the folder. Images become squares of that size, by default their own where
    all are squares of one size, else 224, as for torchvision's networks: the shorter side is
    resized to 256/224 of it, and the center is cropped; see ``Preprocessing``. Augmented training
    images are random crops of the originals, resized to that size, mirrored or not. Where the
    images are squares of that size already, none is resized, and augmented ones are shifted and
    mirrored.
    """
    folder, preprocessing, is_equal = described(rest)
    images = sorted(path for path in folder.iterdir() if path.suffix.lower() in _ENDINGS)
    if images and not any(each.is_dir() for each in folder.iterdir()):
        chosen = images[:: math.ceil(len(images) / _MOST)]
        return _inputs(chosen, preprocessing)
    parts = _parts(folder)
    read = partial(_read, color=preprocessing.color)
    transforms = preprocessing.transform(), _varied(preprocessing, is_equal)
    train, augmented = (read(parts[0], transform) for transform in transforms)
    test = read(parts[-1], transforms[0])
    if train.classes != test.classes:
        raise DataError(
            f"{folder}: train and {parts[-1].name} hold different classes "
            f"({', '.join(sorted(set(train.classes) ^ set(test.classes))[:5])})."
        )
    classes = len(train.classes)
    if len(parts) == 1:
        learned, held_back = _every_fifth(train.targets)
        train, augmented = Subset(train, learned), Subset(augmented, learned)
        test = Subset(test, held_back)
    workers = min(usable_cpus(), _MOST_WORKERS)
    # Reading test images draws no random numbers, so this process may read them.
    judge = Loaded(test, min(workers, len(test) // _WORTH_A_WORKER))
    learn = Loaded(train, workers, augmented)
    return Data(spec, learn, judge, classes, preprocessing)


def described(rest: str) -> tuple[Path, Preprocessing, bool]:
    """Return the folder, how its images become inputs, and whether they have that size already.

    Raises:
        DataError: there is no such folder.
    """
    found = SPEC.fullmatch(rest)
    assert found is not None  # the rest is not empty
    folder = Path(found[1])
    if not folder.is_dir():
        wrong = f"{folder} is a file" if folder.exists() else f"the folder {folder} does not exist"
        raise DataError(
            f"{wrong}. imagefolder:DIR takes a folder with a folder for each class, or with train "
            "and test in it, or for what needs no labels one of images alone"
        )
    side = side_of_images(folder)
    size = max(int(found[3] or side or _SIZE), 1)
    return folder, _imagenet_preprocessing(size, int(found[2] or 3), side == size), side == size


def _parts(folder: Path) -> list[Path]:
    """Return the folders of training and test images, or a single folder to be split."""
    train, *tests = (folder / part for part in ("train", "test", "val"))
    there = [part for part in tests if part.is_dir()]
    if not train.is_dir() and not there and any(each.is_dir() for each in folder.iterdir()):
        return [folder]
    if not train.is_dir() or not there:
        raise DataError(
            f"{folder} needs two folders, train and test (or val), each with one folder per class; "
            "or neither, and one folder per class; or for what needs no labels images alone."
        )
    return [train, there[0]]


def _every_fifth(targets: list[int]) -> tuple[list[int], list[int]]:
    """Return the numbers of the examples to learn from, and of every fifth one of each class."""
    held_back: list[int] = []
    for label in set(targets):
        of_class = [number for number, target in enumerate(targets) if target == label]
        held_back += of_class[_FIFTH - 1 :: _FIFTH]
    return sorted({*range(len(targets))} - {*held_back}), sorted(held_back)


def side_of_images(folder: Path) -> int | None:
    """Return the side of the images in a folder if they are squares of one size, else None.

    Of many images some are read, from all over the folders.
    """
    images = sorted(
        os.path.join(where, name)
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(_ENDINGS)
    )
    sides = set()
    for path in images[:: max(1, len(images) // _SAMPLE)]:
        with suppress(OSError), Image.open(path) as image:
            sides |= {*image.size}
        if len(sides) > 1:
            return None
    return sides.pop() if sides else None


def _imagenet_preprocessing(size: int, channels: int, is_equal: bool) -> Preprocessing:
    """Return the preprocessing of torchvision's ImageNet networks at a given size.

    Grey images take the mean of the three channels' means and deviations. Images of equal size
    have no border that could be cropped.
    """
    resize = size if is_equal else round(size * _BORDER)
    is_grey = channels == 1
    return Preprocessing(
        input_size=[channels, size, size],
        color="L" if is_grey else "RGB",
        resize=resize,
        interpolation="bilinear",
        crop_pct=size / resize,
        crop_mode="center",
        mean=[0.449] if is_grey else [0.485, 0.456, 0.406],
        std=[0.226] if is_grey else [0.229, 0.224, 0.225],
    )


def _varied(preprocessing: Preprocessing, is_equal: bool) -> Any:
    """Return the transform of augmented images; of equal size, they are shifted by an eighth."""
    from torchvision import transforms as T

    size = preprocessing.input_size[1]
    shift = T.Compose([T.Resize(size), T.RandomCrop(size, padding=size // 8)])
    crop = shift if is_equal else T.RandomResizedCrop(size)
    return T.Compose([crop, T.RandomHorizontalFlip(), *preprocessing.to_input()])


def _inputs(images: list[Path], preprocessing: Preprocessing) -> Tensor:
    transform, found = preprocessing.transform(), []
    for path in steps(images):
        try:
            found.append(transform(_opened(str(path), preprocessing.color)))
        except OSError as error:
            raise DataError(f"{path} cannot be read as an image: {error}") from error
    return torch.stack(found)


def _opened(path: str, color: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert(color)


def _read(folder: Path, transform: Any, color: str) -> Any:
    from torchvision import datasets

    try:
        return datasets.ImageFolder(str(folder), transform, loader=partial(_opened, color=color))
    except OSError as error:
        raise DataError(f"{folder} needs one folder of images per class: {error}") from error


def usable_cpus() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
