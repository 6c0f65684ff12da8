"""Data sources by name: the digits and other small sets, folders of images, a user's function."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from l0prune.data.dataset import Data, Loaded, Split, Tensors
from l0prune.errors import DataError, UsageError
from l0prune.usercode import called, is_code, named

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_data(spec: str, root: str | os.PathLike[str] | None = None) -> Data:
    """The data that ``spec`` names.

    Args:
        spec: ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``, ``digits``,
            ``imagefolder:DIR`` (with ``train`` and ``test`` or ``val`` inside), or
            ``file.py:function`` that returns a ``Data`` or two datasets (train, test).
        root: folder of the downloaded sets; else ``$L0PRUNE_DATA``, else a cache folder, where
            torchvision downloads what is not there.

    Raises:
        UsageError: the spec names nothing.
        DataError: the data is missing, empty or damaged.
    """
    kind, _, rest = spec.partition(":")
    folder = Path(root or os.environ.get("L0PRUNE_DATA") or Path.home() / ".cache" / "l0prune")
    if spec in _NAMED:
        return _NAMED[spec](spec, folder)
    if kind == "imagefolder" and rest:
        return _image_folder(spec, Path(rest))
    if is_code(spec):
        return _from_function(spec)
    raise UsageError(
        f"{spec!r} is no data source. Known: {', '.join(_NAMED)}, imagefolder:DIR, "
        "file.py:function."
    )


def _digits(name: str, root: Path) -> Data:
    """1,797 handwritten digits of 8×8 pixels that scikit-learn brings along."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("The digits come with scikit-learn: pip install 'l0prune[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    targets = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return Data(
        name, Tensors(inputs[train], targets[train]), Tensors(inputs[test], targets[test]), 10
    )


def _mnist(name: str, root: Path) -> Data:
    splits = [_torchvision(_CLASSES[name], name, root, train) for train in (True, False)]
    parts = [_scaled(d.data[:, None], d.targets, MNIST_MEAN, MNIST_STD) for d in splits]
    return Data(name, parts[0], parts[1], 10)


def _cifar(name: str, root: Path) -> Data:
    packed = root / "cifar10-jpeg"
    if name == "cifar10" and (packed / "train.npz").exists():
        parts = [_jpegs(packed / f"{part}.npz") for part in ("train", "test")]
        return Data(name, parts[0], parts[1], 10)
    splits = [_torchvision(_CLASSES[name], name, root, train) for train in (True, False)]
    images = [torch.from_numpy(d.data).permute(0, 3, 1, 2) for d in splits]
    labels = [torch.tensor(d.targets) for d in splits]
    pairs = zip(images, labels, strict=True)
    train, test = (_scaled(x, y, CIFAR_MEAN, CIFAR_STD) for x, y in pairs)
    return Data(name, train, test, 100 if name == "cifar100" else 10)


_CLASSES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
_NAMED: dict[str, Callable[[str, Path], Data]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion-mnist": _mnist,
    "cifar10": _cifar,
    "cifar100": _cifar,
}


def _torchvision(dataset: str, name: str, root: Path, train: bool) -> Any:
    """A torchvision dataset; downloaded only where it is not there yet."""
    from torchvision import datasets

    build = getattr(datasets, dataset)
    try:
        return build(str(root), train=train, download=False)
    except (RuntimeError, FileNotFoundError, ValueError):
        pass  # not there: the download below says what is wrong if it fails too
    try:
        return build(str(root), train=train, download=True)
    except Exception as error:
        raise DataError(
            f"{name} is neither in {root} nor could it be downloaded ({error}). Say where it is "
            "with --data-root DIR or the environment variable L0PRUNE_DATA."
        ) from error


def _scaled(
    images: Tensor, labels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensors:
    """Bytes to floats of zero mean and unit deviation; in place, the sets are large."""
    inputs = images.to(torch.float32).div_(255)
    shape = (1, -1, 1, 1)
    inputs.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))
    return Tensors(inputs.contiguous(), labels.to(torch.int64))


def _jpegs(path: Path) -> Tensors:
    """Images packed as JPEG files one after another (arrays jpeg, length, label)."""
    try:
        with np.load(path) as arrays:
            ends = np.cumsum(arrays["length"])
            files = np.split(arrays["jpeg"], ends[:-1])
            labels = torch.from_numpy(arrays["label"])
        pixels = [np.asarray(Image.open(io.BytesIO(file.tobytes()))) for file in files]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    return _scaled(images, labels, CIFAR_MEAN, CIFAR_STD)


def _image_folder(spec: str, folder: Path) -> Data:
    """Folders of images, one for each class, scaled as for ImageNet (224 pixels)."""
    from torchvision import datasets
    from torchvision import transforms as T

    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. imagefolder:DIR needs DIR/train and DIR/test.")
    parts = {p: folder / p for p in ("train", "test", "val") if (folder / p).is_dir()}
    test = parts.get("test", parts.get("val"))
    if "train" not in parts or test is None:
        raise DataError(
            f"{folder} needs two folders, train and test (or val), each with one folder per class."
        )
    scale = [T.ToTensor(), T.Normalize(CIFAR_MEAN, CIFAR_STD)]
    random = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *scale])
    fixed = T.Compose([T.Resize(256), T.CenterCrop(224), *scale])
    try:
        train_set = datasets.ImageFolder(str(parts["train"]), random)
        test_set = datasets.ImageFolder(str(test), fixed)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: {error}") from error
    if train_set.classes != test_set.classes:
        raise DataError(f"{folder}: train and {test.name} hold different classes.")
    workers = min(os.cpu_count() or 1, 8)
    return Data(spec, Loaded(train_set, workers), Loaded(test_set, workers), len(train_set.classes))


def _from_function(spec: str) -> Data:
    found = called(named(spec), spec)
    if isinstance(found, Data):
        return found
    if not isinstance(found, tuple) or len(found) != 2:
        raise DataError(
            f"{spec} must return two datasets, (train, test), not {type(found).__name__}."
        )
    train, test = (_split(part, spec) for part in found)
    return Data(spec, train, test, _class_count(train, test))


def _split(part: Any, spec: str) -> Split:
    if isinstance(part, tuple) and len(part) == 2 and all(isinstance(t, Tensor) for t in part):
        return Tensors(*part)
    if isinstance(part, Tensors | Loaded):
        return part
    if isinstance(part, Dataset) or hasattr(part, "__getitem__"):
        return Loaded(part)
    raise DataError(f"{spec} returned a {type(part).__name__} where a dataset should be.")


def _class_count(*splits: Split) -> int:
    """One more than the largest label."""
    largest = -1
    for split in splits:
        if not len(split):
            continue  # Data says so in its own words
        for _, targets in split.batches(1024):
            if targets.dtype.is_floating_point or int(targets.min()) < 0:
                raise DataError("labels must be class numbers: whole, from 0 up.")
            largest = max(largest, int(targets.max()))
    return largest + 1
