"""Data that a function in the user's own file returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from l0prune.data.dataset import Data, Loaded, Split, Tensors
from l0prune.errors import DataError

_WANTED = (
    "(train, test), each a dataset, a DataLoader or a pair of tensors (inputs, targets), or a "
    "l0prune.Task"
)
_IGNORED = -100  # the target that torch's cross-entropy leaves out


def data_of(found: Any, spec: str) -> Data:
    """What ``file.py:function`` returned as a ``Data``: that itself, or training and test data.

    Raises:
        DataError: it is something else, nothing, or its whole labels are no class numbers.
    """
    if isinstance(found, Data):
        return replace(found, name=spec)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"{spec} must return {_WANTED}, not a {type(found).__name__}.")
    train, test = (_split(part, spec) for part in found)
    counts = [_class_count(part, spec) for part in (train, test)]
    if counts.count(None) == 1:
        raise DataError(f"{spec}: the labels of one part are class numbers, of the other not.")
    return Data(spec, train, test, max(count or 0 for count in counts))


def _split(part: Any, spec: str) -> Split:
    if isinstance(part, Tensors | Loaded):
        return part
    if isinstance(part, tuple | list) and len(part) == 2:
        inputs, targets = part
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return Tensors(inputs, targets if targets.is_floating_point() else targets.long())
    if isinstance(part, DataLoader) and not isinstance(part.dataset, IterableDataset):
        return Loaded(part.dataset, part.num_workers, collate=part.collate_fn)
    is_dataset = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    if is_dataset and not isinstance(part, Tensor | dict | str):
        return Loaded(part)
    raise DataError(
        f"{spec} returned a {type(part).__name__} where a dataset with a length should be. It must "
        f"return {_WANTED}."
    )


def _class_count(split: Split, spec: str) -> int | None:
    """Number of classes as far as this part of the data shows; None if targets are no classes."""
    if not len(split):
        return 0  # Data says so in its own words
    if isinstance(split, Tensors):
        return _count(split.targets, spec)
    assert isinstance(split, Loaded)
    classes = getattr(split.dataset, "classes", None)
    if isinstance(classes, list | tuple):
        return len(classes)
    known = _known_targets(split.dataset)
    if known is not None:
        return _count(known, spec)
    counts = [_count(targets, spec) for _, targets in split.batches(256)]
    return None if None in counts else max(count or 0 for count in counts)


def _known_targets(dataset: Any) -> Tensor | None:
    """All labels of a dataset that has them at hand, so that no example need be read."""
    if isinstance(dataset, Subset):
        whole = _known_targets(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    targets = getattr(dataset, "targets", None)
    if isinstance(targets, Tensor):
        return targets
    is_numbers = isinstance(targets, list) and all(isinstance(t, int) for t in targets)
    return torch.tensor(targets) if is_numbers else None


def _count(targets: Any, spec: str) -> int | None:
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    numbers = targets[targets != _IGNORED]
    if numbers.numel() and int(numbers.min()) < 0:
        raise DataError(f"{spec}: labels must be class numbers: whole, from 0 up.")
    return int(numbers.max()) + 1 if numbers.numel() else 0
