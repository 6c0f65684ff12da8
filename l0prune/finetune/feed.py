"""Batches of any source, in an order that the seed and the number of the epoch decide."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from l0prune.errors import DataError
from l0prune.finetune.task import Source, Task, batch_length, is_split


class Feed:
    """The training batches of a task.

    Attributes:
        task: where they come from.
        batch_size: examples a batch, where the source lets us choose.
        size: N, the number of training examples.
        steps: training batches an epoch.

    Raises:
        DataError: the source is empty, or cannot say how much it holds.
    """

    def __init__(self, task: Task, batch_size: int, seed: int, augment: bool) -> None:
        self.task = task
        self.batch_size = batch_size
        self._seed = seed
        self._augment = augment
        self.size = task.size if task.size is not None else _examples(task.train)
        self.steps = task.steps if task.steps is not None else self._count()
        if not self.steps or not self.size:
            raise DataError("the training data is empty")

    def _count(self) -> int:
        if is_split(self.task.train):
            return max(1, len(self.task.train) // self.batch_size)
        return _length(self.task.train, "Task(…, steps=…)")

    def train(self, epoch: int, device: torch.device) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch."""
        source = self.task.train
        if is_split(source):
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            batches = source.batches(
                self.batch_size, generator=generator, device=device, augment=self._augment
            )
            return islice(batches, self.steps)
        set_epoch = getattr(getattr(source, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return (_on(_pair(batch), device) for batch in islice(iter(source), self.steps))

    def generators(self) -> list[torch.Generator]:
        """Generators that belong to the training source and decide its order."""
        found = [
            getattr(holder, "generator", None)
            for holder in (self.task.train, getattr(self.task.train, "sampler", None))
        ]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def test_batches(task: Task, batch_size: int, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Every test batch once, in order; none where the task has no test data."""
    source = task.test
    if source is None:
        return iter(())
    if is_split(source):
        return source.batches(batch_size, device=device)
    return (_on(_pair(batch), device) for batch in source)


def _examples(source: Source) -> int:
    """How many examples a source holds."""
    if is_split(source):
        return len(source)
    dataset = getattr(source, "dataset", None)
    if dataset is not None and hasattr(dataset, "__len__"):
        return len(dataset)
    if isinstance(source, (list, tuple)):
        return sum(batch_length(*_pair(batch)) for batch in source)
    raise DataError(
        "the training data cannot say how many examples it holds, which λ in N needs; "
        "give Task(…, size=N)"
    )


def _length(source: Any, way_on: str) -> int:
    if not hasattr(source, "__len__"):
        raise DataError(f"the training data cannot say how many batches it has; give {way_on}")
    return len(source)


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        f"a batch must be (inputs, targets), but the data gave a {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else "")
        + "; several inputs go into a tuple or a dict"
    )


def _on(part: Any, device: torch.device) -> Any:
    """Every tensor in a batch on ``device``."""
    if isinstance(part, Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, dict):
        return {key: _on(value, device) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        return tuple(_on(value, device) for value in part)
    return part


def call(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's outputs: a tuple is its positional arguments, a dict its keyword ones."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)
