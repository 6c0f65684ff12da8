"""Examples in memory or behind a loader, in an order that a generator reproduces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from l0prune.data.augment import shifted_and_mirrored
from l0prune.errors import DataError

Batch = tuple[Any, Tensor]


class Split(Protocol):
    """One part of a data source: training or test examples."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        augment: bool = False,
    ) -> Iterator[Batch]:
        """Batches of inputs and targets on ``device``.

        With a generator the order is shuffled by it and the last, smaller batch is left out
        where there is a full one; without one every example comes once, in order.
        """
        ...

    def example(self, count: int) -> Any:
        """The inputs of the first ``count`` examples, on the CPU."""
        ...


@dataclass(frozen=True)
class Tensors:
    """Examples that fit into memory: a batch is one ``index_select``.

    Attributes:
        inputs: float32, ready for the model, shape (examples, …).
        targets: int64 class numbers, shape (examples,).
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        augment: bool = False,
    ) -> Iterator[Batch]:
        """See ``Split.batches``."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        if generator is None:
            yield from zip(inputs.split(batch_size), targets.split(batch_size), strict=True)
            return
        order = torch.randperm(len(self), generator=generator).to(device)
        for index in order.split(batch_size):
            if len(index) < min(batch_size, len(self)):
                return
            batch = inputs.index_select(0, index)
            if augment:
                batch = shifted_and_mirrored(batch, generator)
            yield batch, targets.index_select(0, index)

    def example(self, count: int) -> Tensor:
        """The first ``count`` inputs."""
        return self.inputs[:count]


@dataclass(frozen=True)
class Loaded:
    """Examples read one by one from a torch dataset, by a DataLoader with ``workers`` processes."""

    dataset: Dataset
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        augment: bool = False,
    ) -> Iterator[Batch]:
        """See ``Split.batches``; augmentation is the dataset's own affair."""
        shuffled = generator is not None
        loader: DataLoader = DataLoader(
            self.dataset,
            batch_size,
            shuffle=shuffled,
            drop_last=shuffled and len(self) >= batch_size,
            generator=generator,
            num_workers=self.workers,
        )
        for inputs, targets in loader:
            yield _moved(inputs, device), torch.as_tensor(targets).to(device)

    def example(self, count: int) -> Any:
        """The first ``count`` inputs."""
        return next(self.batches(count))[0]


def _moved(inputs: Any, device: torch.device | str) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, list | tuple):
        return tuple(_moved(part, device) for part in inputs)
    return inputs


@dataclass(frozen=True)
class Data:
    """A data source.

    Attributes:
        name: as the user named it.
        train: what is learned from; its length is N.
        test: what is reported on.
        classes: number of classes.
    """

    name: str
    train: Split
    test: Split
    classes: int

    def __post_init__(self) -> None:
        for part, split in (("training", self.train), ("test", self.test)):
            if not len(split):
                raise DataError(f"{self.name} holds no {part} examples.")

    def check_fits(self, outputs: int) -> None:
        """Refuse a model with fewer outputs than there are classes.

        Raises:
            DataError: labels would exceed the model's classes.
        """
        if outputs < self.classes:
            raise DataError(
                f"{self.name} has {self.classes} classes, but the model has {outputs} outputs. "
                "Use a model whose last layer has one output for each class, or other data."
            )
