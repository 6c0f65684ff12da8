"""Batches of a task: their parts, the call of a model on them, and their order.

Seed and epoch number determine the order. A batch may be one part of a larger one, for processes
and micro-batches; its weight is that in the mean over all parts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from l0prune.capture.compat import pytree
from l0prune.capture.copying import inside
from l0prune.data.dataset import (
    LABELS,
    USUAL_BATCH_SIZE,
    WHOLE,
    Share,
    as_arguments,
    inputs_and_targets,
    map_tensors,
    part_length,
    part_slice,
    to_device,
    without_labels,
)
from l0prune.errors import DataError
from l0prune.running.task import Source, Task, batch_length, is_detection_batch, is_split


class Batch(NamedTuple):
    """Examples to compute on.

    Attributes:
        inputs: a tensor, a tuple of positional or a dict of keyword arguments of the model.
        targets: what the loss compares the outputs with.
        weight: weight of the mean over these examples in the mean over all parts of the whole
            batch: their number over that of a mean part. 1 for a whole batch or an equal part,
            0 for a borrowed example, which belongs to another part.
    """

    inputs: Any
    targets: Any
    weight: float = 1.0

    @property
    def examples(self) -> int:
        """Number of examples that count."""
        return batch_length(self.inputs, self.targets) if self.weight else 0

    def part(self, part: Share) -> Batch:
        """Return one part of the batch, with its weight among all parts."""
        if part[1] == 1:
            return self
        length = batch_length(self.inputs, self.targets)
        where = part_slice(length, part)
        weight = self.weight * part_weight(length, part)
        if is_detection_batch(self.inputs, self.targets):
            return Batch(self.inputs[where], self.targets[where], weight)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            if len(leaf) != length:
                raise DataError(
                    f"a batch of {length} examples also holds a tensor of {len(leaf)}, so that it "
                    "cannot be divided among processes or micro-batches: batch every input and "
                    "target along its first dim, or give each process batches of its own (a "
                    "DataLoader with a DistributedSampler, and accumulate=1)"
                )
            return leaf[where]

        inputs, targets = pytree.tree_map(cut, (self.inputs, self.targets))
        return Batch(inputs, targets, weight)

    def parts(self, count: int) -> Iterator[Batch]:
        """Yield the batch in ``count`` parts, one after another."""
        return (self.part((number, count)) for number in range(count))

    def head(self, most: int) -> Batch:
        """Return the first examples, at most ``most``; all if the batch cannot be divided."""
        length = batch_length(self.inputs, self.targets)
        try:
            return self.part((0, max(1, math.ceil(length / most))))
        except DataError:
            return self


def part_weight(length: int, part: Share) -> float:
    """Return the number of examples in a part over that in a mean part."""
    return part_length(length, part) * part[1] / length


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model: a tuple holds its positional arguments, a mapping its keyword ones.

    Labels among the inputs are passed on only if the model's forward has a parameter for them.
    """
    args, kwargs = as_arguments(inputs)
    return model(*args, **_fitting(model, kwargs))


def _fitting(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    taken = _names(inside(model)) if given and isinstance(model, nn.Module) else None
    if taken is None:
        return given
    if "labels" in taken and "label" in given.keys() - taken:
        given = {("labels" if name == "label" else name): v for name, v in given.items()}
    unknown = [name for name in given if name not in taken and name not in LABELS]
    if unknown:
        raise DataError(
            f"the batches hold {', '.join(map(str, unknown))}, which the forward of "
            f"{type(inside(model)).__name__} does not take; it takes {', '.join(taken)}. Leave "
            "out of them what is no input (of a data set: remove_columns)"
        )
    return {name: value for name, value in given.items() if name in taken}


def _names(model: nn.Module) -> dict[str, None] | None:
    """Return the names of forward's parameters; None if it takes any or is not overridden."""
    forward = type(model).forward
    return None if forward is nn.Module.forward else _names_of(forward)


@lru_cache(maxsize=64)
def _names_of(forward: Callable[..., Any]) -> dict[str, None] | None:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return dict.fromkeys(each.name for each in parameters if each.kind in kinds)


class Feed:
    """Feed of the training batches of a task.

    Attributes:
        part: this process's part of every batch.
        batch_size: examples per batch over all processes, if the source lets it be chosen.
        size: N, the number of training examples; None if neither the task nor its data says it.
        steps: training batches per epoch.
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
        if not self.steps or self.size == 0:
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
            size = self.task.size
            return size // own if drops else -(-size // own)
        raise DataError(
            "the training data cannot say how many batches it has: give Task(…, steps=…), the "
            "number of batches, or for a loader of batches Task(…, size=N), that of examples"
        )

    @property
    def length(self) -> int:
        """Number of examples per batch over all processes, as the source yields them."""
        source = self.task.train
        if is_split(source):
            return self.batch_size
        own = getattr(source, "batch_size", None)
        if isinstance(own, int):
            return own * (self.part[1] if _is_distributed(source) else 1)
        if self.size is None:
            first: Any = next(iter(source), None)
            return 1 if first is None else batch_length(*self.task.pair(first))
        return max(1, round(self.size / self.steps))

    def train(self, epoch: int, device: torch.device) -> Iterator[Batch]:
        """Return the training batches of an epoch on the device."""
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
            weight = part_weight(min(self.batch_size, len(source)), self.part)
            return (
                Batch(map_tensors(inputs), map_tensors(targets), weight)
                for inputs, targets in map(self.task.pair, islice(batches, self.steps))
            )
        set_epoch = getattr(getattr(source, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        loaded = islice(self._in_one_order(source, epoch), self.steps)
        part = WHOLE if _is_distributed(source) else self.part
        return (Batch(*to_device(self.task.pair(batch), device)).part(part) for batch in loaded)

    def _seed_of(self, epoch: int) -> int:
        return self._seed * 1_000_003 + epoch

    def _in_one_order(self, source: Any, epoch: int) -> Iterator[Any]:
        """Return the batches of a user's loader, in the same order in every process.

        A loader draws its order from the global generator when it yields its first batch.
        """
        if self.part == WHOLE:
            return iter(source)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed_of(epoch))
            batches = iter(source)
            first = list(islice(batches, 1))
        return chain(first, batches)

    def generators(self) -> list[torch.Generator]:
        """Return the generators of the training source, which determine its order."""
        found = [
            getattr(holder, "generator", None)
            for holder in (self.task.train, getattr(self.task.train, "sampler", None))
        ]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def usual_batch_size(source: Any) -> int:
    """Return the default number of examples in a batch of this source."""
    return int(getattr(source, "usual_batch_size", USUAL_BATCH_SIZE))


def test_batches(task: Task, batch_size: int, device: torch.device, part: Share) -> Iterator[Batch]:
    """Yield every test batch once, in order, or one part of each; none without test data."""
    source = task.test
    if source is None:
        return
    if is_split(source):
        lengths = (min(batch_size, len(source) - k) for k in range(0, len(source), batch_size))
        batches = source.batches(batch_size, device=device, part=part)
        for (inputs, targets), length in zip(map(task.pair, batches), lengths, strict=True):
            yield Batch(map_tensors(inputs), map_tensors(targets), part_weight(length, part))
        return
    if _is_distributed(source):
        part = WHOLE
    for batch in source:
        yield Batch(*to_device(task.pair(batch), device)).part(part)


def count_of_batches(source: Source | None, batch_size: int) -> int | None:
    """Return the number of batches of a source; None if it cannot say that."""
    return -(-len(source) // batch_size) if is_split(source) else _length(source)


def example_inputs(task: Task, count: int) -> Any:
    """Return the inputs of the first ``count`` training examples, on the CPU."""
    source = task.train
    if is_split(source):
        return without_labels(source.example(count))
    batch = next(iter(source), None)
    if batch is None:
        raise DataError("the training data is empty")
    inputs, targets = to_device(inputs_and_targets(batch), "cpu")
    if is_detection_batch(inputs, targets):
        return (inputs[:count],)
    length = batch_length(inputs, targets)

    def first(tensor: Tensor) -> Tensor:
        return tensor[:count] if tensor.dim() and len(tensor) == length else tensor

    return map_tensors(without_labels(inputs), first)


def _is_distributed(source: Any) -> bool:
    return isinstance(getattr(source, "sampler", None), DistributedSampler)


def _examples(source: Source) -> int | None:
    """Return the number of examples of a source; None if it cannot say that."""
    if is_split(source):
        return len(source)
    found = _length(getattr(source, "dataset", None))
    if found is not None:
        return found
    if isinstance(source, (list, tuple)):
        return sum(batch_length(*inputs_and_targets(batch)) for batch in source)
    if isinstance(source, Tensor):
        raise DataError(
            "the training data is a tensor of inputs without targets: give (inputs, targets) "
            "batches, or learn from the model's own answers, which "
            "l0prune.with_pseudo_labels(inputs, model) makes before the model is gated"
        )
    return None


def _length(source: Any) -> int | None:
    """Return the length of a source; None if it has none, such as the loader of a stream."""
    try:
        return len(source)
    except TypeError:
        return None
