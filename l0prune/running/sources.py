"""Data sources by name, and the tasks that functions of the user's return."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from l0prune.data.dataset import Data
from l0prune.data.folder import image_folder
from l0prune.data.function import data_of
from l0prune.data.small import cifar, digits, mnist
from l0prune.errors import UsageError
from l0prune.files.consent import is_code
from l0prune.files.user_code import called, named
from l0prune.running.task import Task

_NAMED: dict[str, Callable[[str, Path], Data]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": mnist,
    "cifar10": cifar,
    "cifar100": cifar,
}


def load_data(spec: str, root: str | os.PathLike[str] | None = None) -> Data | Task:
    """The data that ``spec`` names.

    Args:
        spec: ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``, ``digits``,
            ``imagefolder:DIR`` (with ``train`` and ``test`` or ``val`` inside; inputs of 224×224
            pixels, or as many as in ``imagefolder:DIR:64``: see ``preprocessing``), or
            ``file.py:function`` that returns two datasets (train, test), a ``Data``, or a
            ``Task`` with its own loss.
        root: folder of the downloaded sets; else ``$L0PRUNE_DATA``, else a cache folder, where
            torchvision downloads what is not there.

    Raises:
        DataError: the data is missing, empty or damaged.
        FileError: the Python file is missing, or fails.
        UsageError: the spec names nothing, or the function fails.
    """
    kind, _, rest = spec.partition(":")
    if spec in _NAMED:
        cache = Path.home() / ".cache" / "l0prune"
        return _NAMED[spec](spec, Path(root or os.environ.get("L0PRUNE_DATA") or cache))
    if kind == "imagefolder" and rest:
        return image_folder(spec, rest)
    if is_code(spec):
        found = called(named(spec), spec)
        return replace(found, name=spec) if isinstance(found, Task) else data_of(found, spec)
    raise UsageError(
        f"{spec!r} is no data source. Known: {', '.join(_NAMED)}, imagefolder:DIR, "
        "file.py:function."
    )
