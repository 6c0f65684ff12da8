"""Batches of any source, in an order that the seed and the number of the epoch decide."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from l0prune.data.dataset import WHOLE, Share, Split, moved, pair, plain, without_labels
from l0prune.errors import DataError
from l0prune.running.batch import Batch, weight_of
from l0prune.running.task import Source, Task, are_lists, batch_length, is_split


class Feed:
    """The training batches of a task.

    Attributes:
        task: where they come from.
        part: which part of every batch is this process'.
        batch_size: examples a batch of all processes, where the source lets us choose.
        size: N, the number of training examples.
        steps: training batches an epoch.

    Raises:
        DataError: the source is empty, or cannot say how much it holds.
    """

    def __init__(
        self, task: Task, batch_size: int, seed: int, augment: bool, part: Share = WHOLE
    ) -> None:
        self.task = task
        self.part = part
        self.batch_size = batch_size
        self._seed = seed
        self._augment = augment
        self.size = task.size if task.size is not None else _examples(task.train)
        self.steps = task.steps if task.steps is not None else self._count()
        if not self.steps or not self.size:
            raise DataError("the training data is empty")

    def _count(self) -> int:
        source = self.task.train
        if is_split(source):
            return max(1, len(source) // self.batch_size)
        found, own = _length(source), getattr(source, "batch_size", None)
        if found is not None:
            return found
        if self.task.size is not None and isinstance(own, int):  # a stream in batches
            drops = getattr(source, "drop_last", False)
            return self.size // own if drops else -(-self.size // own)
        raise DataError(
            "the training data cannot say how many batches it has; give Task(…, steps=…)"
        )

    @property
    def length(self) -> int:
        """Examples a batch of all processes, as the source makes them."""
        source = self.task.train
        if is_split(source):
            return self.batch_size
        own = getattr(source, "batch_size", None)
        if isinstance(own, int):
            return own * (self.part[1] if _is_shared_out(source) else 1)
        return max(1, round(self.size / self.steps))

    def train(self, epoch: int, device: torch.device) -> Iterator[Batch]:
        """The batches of an epoch."""
        source = self.task.train
        if is_split(source):
            generator = torch.Generator().manual_seed(self._seed_of(epoch))
            batches = source.batches(
                self.batch_size,
                generator=generator,
                device=device,
                augment=self._augment,
                part=self.part,
            )
            weight = weight_of(min(self.batch_size, len(source)), self.part)
            return (
                Batch(plain(inputs), plain(targets), weight)
                for inputs, targets in map(self.task.pair, islice(batches, self.steps))
            )
        set_epoch = getattr(getattr(source, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        loaded = islice(self._in_one_order(source, epoch), self.steps)
        part = WHOLE if _is_shared_out(source) else self.part
        return (Batch(*moved(self.task.pair(batch), device)).part(part) for batch in loaded)

    def _seed_of(self, epoch: int) -> int:
        return self._seed * 1_000_003 + epoch

    def _in_one_order(self, source: Any, epoch: int) -> Iterator[Any]:
        """A loader's own batches, the same ones in every process.

        A loader draws its order from the global generator when it is asked for its first batch.
        """
        if self.part == WHOLE:
            return iter(source)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed_of(epoch))
            batches = iter(source)
            first = list(islice(batches, 1))
        return chain(first, batches)

    def generators(self) -> list[torch.Generator]:
        """Generators that belong to the training source and decide its order."""
        found = [
            getattr(holder, "generator", None)
            for holder in (self.task.train, getattr(self.task.train, "sampler", None))
        ]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def test_batches(task: Task, batch_size: int, device: torch.device, part: Share) -> Iterator[Batch]:
    """Every test batch once, in order, or this part of each; none where there is no test data."""
    source = task.test
    if source is None:
        return
    if is_split(source):
        lengths = _lengths(source, batch_size)
        batches = source.batches(batch_size, device=device, part=part)
        for (inputs, targets), length in zip(map(task.pair, batches), lengths, strict=True):
            yield Batch(plain(inputs), plain(targets), weight_of(length, part))
        return
    if _is_shared_out(source):
        part = WHOLE
    for batch in source:
        yield Batch(*moved(task.pair(batch), device)).part(part)


def example(task: Task, count: int) -> Any:
    """The inputs of the first examples of the training data, ``count`` of them, on the CPU.

    Raises:
        DataError: there are none.
    """
    source = task.train
    if is_split(source):
        return without_labels(source.example(count))
    batch = next(iter(source), None)
    if batch is None:
        raise DataError("the training data is empty")
    inputs, targets = moved(pair(batch), "cpu")
    if are_lists(inputs, targets):
        return (inputs[:count],)
    length = batch_length(inputs, targets)

    def first(tensor: Tensor) -> Tensor:
        return tensor[:count] if tensor.dim() and len(tensor) == length else tensor

    return plain(without_labels(inputs), first)


def _lengths(source: Split, batch_size: int) -> Iterator[int]:
    """The length of each batch of all examples."""
    for start in range(0, len(source), batch_size):
        yield min(batch_size, len(source) - start)


def _is_shared_out(source: Any) -> bool:
    """Return whether the source gives every process batches of its own already."""
    return isinstance(getattr(source, "sampler", None), DistributedSampler)


def _examples(source: Source) -> int:
    """Return the number of examples that a source holds."""
    if is_split(source):
        return len(source)
    found = _length(getattr(source, "dataset", None))
    if found is not None:
        return found
    if isinstance(source, (list, tuple)):
        return sum(batch_length(*pair(batch)) for batch in source)
    raise DataError(
        "the training data cannot say how many examples it holds, which λ in N needs; "
        "give Task(…, size=N)"
    )


def _length(source: Any) -> int | None:
    """The length of a source, or None where it has none; a stream's loader finds out when asked."""
    try:
        return len(source)
    except TypeError:
        return None
