"""Inputs of a model as users have them: tensors in tuples and lists, batches without targets."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.copying import inside
from l0prune.data import Data, Loaded
from l0prune.data.dataset import Tensors, map_tensors, without_labels
from l0prune.errors import DataError
from l0prune.running.batches import Feed
from l0prune.running.task import Task, batch_length, is_split

_ENOUGH = 8  # batches wanted where their size can be chosen


def inputs_for(model: nn.Module, given: Any) -> Any:
    """Return inputs such that a ``Task`` can be made of them, or one mapping of all examples.

    A tuple or list of tensors, one for each argument that the model's forward needs, holds the
    arguments for all examples; of other tensors it holds batches, but a pair of tensors may be
    inputs with their targets, too. Batches may be inputs alone.

    Raises:
        DataError: it is not clear what the tensors are.
    """
    arguments = _Arguments.of(model)
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given)
    if isinstance(given, Tensor) and arguments.needed > 1:
        raise DataError(f"one tensor was given, but {arguments}")
    if isinstance(given, Task | Data | Tensor | Mapping | _Batches) or is_split(given):
        return given
    if isinstance(given, Iterator):
        raise DataError(
            "inputs are gone through more than once, which this iterator does not allow: give a "
            "list of batches or a DataLoader"
        )
    is_list = isinstance(given, tuple | list)
    if is_list and len(given) > 1 and all(isinstance(each, Tensor) for each in given):
        return _of_tensors(given, arguments)
    if isinstance(given, tuple) and len(given) == 2:  # training and test data
        return tuple(None if each is None else inputs_for(model, each) for each in given)
    if is_list:
        return [arguments.batch(each) for each in given]
    source = Task.of(given).train
    if isinstance(source, Loaded):
        return Loaded(source.dataset, source.workers, None, _Collate(source, arguments))
    return _Batches(source, arguments)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Positional arguments of a model's forward.

    Attributes:
        model: name of its class.
        names: of the arguments.
        needed: how many have no default.
    """

    model: str
    names: tuple[str, ...]
    needed: int

    @classmethod
    def of(cls, model: nn.Module) -> _Arguments:
        """Return the arguments of a model's forward."""
        kind = type(inside(model))
        given = list(inspect.signature(kind.forward).parameters.values())[1:]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = [each for each in given if each.kind in kinds]
        needed = sum(each.default is inspect.Parameter.empty for each in found)
        return cls(kind.__name__, tuple(each.name for each in found), needed)

    def __str__(self) -> str:
        """Return a clause that names the arguments and how to give them."""
        names = self.names[: self.needed]
        shown = ", ".join(f"{name!r}: tensor" for name in names)
        return f"the forward of {self.model} takes {', '.join(names)}: give a mapping, {{{shown}}}"

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the first arguments by name."""
        return dict(zip(self.names, tensors, strict=False))

    def batch(self, batch: Any) -> Any:
        """Return a batch as a mapping of several inputs, or as inputs and targets or None.

        Raises:
            DataError: it has fewer tensors than the forward needs.
        """
        if isinstance(batch, Tensor):
            batch = (batch,)
        is_tensors = isinstance(batch, tuple | list) and all(isinstance(x, Tensor) for x in batch)
        if not is_tensors:
            return batch
        count = max(1, self.needed)
        if len(batch) < count:
            raise DataError(f"a batch of {len(batch)} tensors was given, but {self}")
        if len(batch) == count:
            return self.named(batch) if count > 1 else (batch[0], None)
        if len(batch) == count + 1 and count > 1:
            return self.named(batch[:-1]), batch[-1]
        return batch


def _of_tensors(given: Sequence[Tensor], arguments: _Arguments) -> Any:
    """Return several tensors as arguments of all examples, as inputs and targets, or as batches."""
    first, second, *more = given
    lengths = {len(each) if each.dim() else 0 for each in given}
    if arguments.needed > 1:
        if len(given) == arguments.needed and len(lengths) == 1:
            return arguments.named(given)
        raise DataError(
            f"{len(given)} tensors of {', '.join(map(str, sorted(lengths)))} examples were given, "
            f"but {arguments}, of equally many examples"
        )
    if more or first.shape[1:] == second.shape[1:]:
        is_pair = isinstance(given, tuple) and not more  # training and test data
        return tuple(given) if is_pair else [arguments.batch(each) for each in given]
    if len(lengths) == 1 and len(arguments.names) < 2:
        return Tensors(first, second)
    raise DataError(
        "two tensors of other shapes were given, which may be two inputs, or inputs and targets: "
        f"give the inputs as a mapping, {{{arguments.names[0]!r}: tensor, …}}, or the first tensor "
        "alone"
    )


class _Batches:
    """Batches of another source, as ``_Arguments.batch`` returns them."""

    def __init__(self, source: Any, arguments: _Arguments) -> None:
        self._source, self._arguments = source, arguments

    def __iter__(self) -> Iterator[Any]:
        return map(self._arguments.batch, self._source)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the source, such as its ``dataset`` or ``batch_size``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)


class _Collate:
    """Collate function of examples that may be inputs alone; a class, since workers pickle it."""

    def __init__(self, source: Loaded, arguments: _Arguments) -> None:
        self._collate, self._arguments = source.collate, arguments

    def __call__(self, examples: list[Any]) -> Any:
        return self._arguments.batch(self._collate(examples))


def inputs_of(
    given: Any, samples: int, batch_size: int, place: torch.device, seed: int
) -> Iterator[tuple[Any, Any]]:
    """Yield batches of a model's inputs, with their targets or None, on a device.

    They come in random order where there is a choice.

    Raises:
        DataError: there are none, or some are not finite.
    """
    found: Iterator[tuple[Any, Any]]
    if isinstance(given, Tensor) or _is_example(given):
        generator = torch.Generator().manual_seed(seed)
        each = {"": given} if isinstance(given, Tensor) else given
        counts = {name: len(value) if value.dim() else 0 for name, value in each.items()}
        if len({*counts.values()}) > 1:
            sizes = ", ".join(f"{name}: {count or 'one number'}" for name, count in counts.items())
            raise DataError(f"the inputs are of unequally many examples ({sizes})")
        (count,) = {*counts.values()}
        size = _size(batch_size, min(count, samples))
        order = torch.randperm(count, generator=generator)[:samples].split(size)
        found = ((_rows(given, index, place), None) for index in order)
    else:
        task = Task.of(given)
        if isinstance(task.train, Tensor) or _is_example(task.train):
            yield from inputs_of(task.train, samples, batch_size, place, seed)
            return
        if is_split(task.train):
            batch_size = _size(batch_size, min(len(task.train), samples))
        feed = Feed(task, batch_size, seed, augment=False)
        found = ((batch.inputs, batch.targets) for batch in feed.train(0, place))
        if not is_split(task.train):
            found = _shuffled(found, samples, seed)
    left = samples
    for inputs, targets in found:
        if left <= 0:
            return
        left -= batch_length(inputs, targets)
        _check_finite(inputs)
        yield without_labels(inputs), targets


def _shuffled(
    batches: Iterator[tuple[Any, Any]], samples: int, seed: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the first batches of so many examples in random order.

    Batches of a user are often sorted (files of one text after another), and the first ones would
    be used most.
    """
    held: list[tuple[Any, Any]] = []
    for batch in batches:
        held.append(batch)
        samples -= batch_length(*batch)
        if samples <= 0:
            break
    for number in torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)):
        yield held[number]


def _rows(given: Any, index: Tensor, place: torch.device) -> Any:
    return map_tensors(given, lambda tensor: tensor[index].to(place))


def _size(batch_size: int, examples: int) -> int:
    """Return a batch size, reduced so that there are ``_ENOUGH`` batches."""
    return max(1, min(batch_size, examples // _ENOUGH))


def _is_example(given: Any) -> bool:
    is_mapping = isinstance(given, Mapping) and bool(given)
    return is_mapping and all(isinstance(value, Tensor) for value in given.values())


def _check_finite(batch: Any) -> None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
            raise DataError("the inputs hold numbers that are not finite (NaN or infinite)")
