"""Examples in memory or read by a DataLoader, and the parts of a batch.

A generator makes their order reproducible. A batch is (inputs, targets), or a mapping that holds
its targets as labels; inputs may be tensors in mappings and lists of any kind.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import DataError, UsageError

# Names of the targets: that of transformers' models first, then that of data sets.
LABELS = ("labels", "label")


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; a mapping's targets are its labels, else the mapping.

    The labels stay among the inputs: a model may compute its loss from them.
    """
    if isinstance(batch, Mapping):
        return batch, next((batch[name] for name in LABELS if name in batch), batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise DataError(
        f"a batch must be (inputs, targets) or a dict, but the data gave a {type(batch).__name__}"
        f"{length}. Without labels, the model's own answers can be learned from: "
        "l0prune.with_pseudo_labels(inputs, model), before gate. Several inputs go into a tuple or "
        "a dict"
    )


def without_labels(inputs: Any) -> Any:
    """Return the inputs without labels among them."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: value for name, value in inputs.items() if name not in LABELS}


def map_tensors(part: Any, change: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
    """Apply ``change`` to each tensor in a part of a batch; mappings and lists are converted.

    They become dicts and tuples; a tokenizer's ``BatchEncoding`` becomes a dict, too.
    """
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, Mapping):
        return {name: map_tensors(value, change) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(map_tensors(value, change) for value in part)
    return part


def to_device(part: Any, device: torch.device | str) -> Any:
    """Return a part of a batch with every tensor on ``device``."""
    return map_tensors(part, lambda tensor: tensor.to(device, non_blocking=True))


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a model, from a tuple and a mapping."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


Batch = tuple[Any, Any]
Augmentation = Callable[[Tensor, torch.Generator], Tensor]

Share = tuple[int, int]  # index from 0, and count, of equal parts of a batch
WHOLE: Share = (0, 1)
USUAL_BATCH_SIZE = 100


def part_slice(examples: int, part: Share) -> slice:
    """Return the slice of a part; all parts in order make the whole.

    With fewer examples than parts, some are empty: these borrow one example, of weight 0, since the
    process that has the part may have to take part in collective operations.
    """
    start = part[0] * examples // part[1]
    return slice(start, start + max(1, part_length(examples, part)))


def part_length(examples: int, part: Share) -> int:
    """Return the number of examples of a part; 0 if it borrows one."""
    number, count = part
    return (number + 1) * examples // count - number * examples // count


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
        part: Share = WHOLE,
    ) -> Iterator[Batch]:
        """Yield batches of inputs and targets on ``device``.

        A generator shuffles the order, and a last, smaller batch is left out unless it is the only
        one; without a generator every example comes once, in order. With ``augment`` the examples
        are varied at random, by the same generator. Of each batch only ``part`` is yielded (see
        ``part_slice``); all parts together are the whole batch.

        Raises:
            DataError: an example cannot be read.
            UsageError: the source has no augmentation.
        """
        ...

    def example(self, count: int) -> Any:
        """Return the inputs of the first ``count`` examples, on the CPU, without augmentation."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Tensors:
    """Examples in memory: a batch is one ``index_select``.

    Attributes:
        inputs: ready for the model, shape (examples, …).
        targets: int64 class numbers, shape (examples, …), or numbers of any type.
        augmentation: random augmentation of a batch of inputs, if any.
        usual_batch_size: default number of examples per batch.
    """

    inputs: Tensor
    targets: Tensor
    augmentation: Augmentation | None = None
    usual_batch_size: int = USUAL_BATCH_SIZE
    _moved: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.inputs.dim() == 0 or len(self.inputs) != len(self.targets):
            raise DataError(
                f"there are {len(self.targets)} targets for inputs of shape "
                f"{tuple(self.inputs.shape)}; each example needs one"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        shapes = f"inputs {tuple(self.inputs.shape)}, targets {tuple(self.targets.shape)}"
        return f"{type(self).__name__}({shapes})"

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        augment: bool = False,
        part: Share = WHOLE,
    ) -> Iterator[Batch]:
        """See ``Split.batches``."""
        augmentation = _wanted(self.augmentation, augment)
        inputs, targets = self._on(torch.device(device))
        if generator is None:
            for batch, answers in zip(
                inputs.split(batch_size), targets.split(batch_size), strict=True
            ):
                rows = part_slice(len(answers), part)
                yield batch[rows], answers[rows]
            return
        order = torch.randperm(len(self), generator=generator).to(device)
        for index in order.split(batch_size):
            if len(index) < min(batch_size, len(self)):
                return
            batch = inputs.index_select(0, index)
            if augmentation is not None:  # draws for the whole batch, so that parts differ
                batch = augmentation(batch, generator)
            rows = part_slice(len(index), part)
            yield batch[rows], targets.index_select(0, index[rows])

    def example(self, count: int) -> Tensor:
        """See ``Split.example``."""
        return self.inputs[:count].cpu()

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all examples on the device, where they stay until moved to another one."""
        if str(device) not in self._moved:
            self._moved.clear()
            with torch.inference_mode(False):  # else no later training step could use them
                self._moved[str(device)] = self.inputs.to(device), self.targets.to(device)
        return self._moved[str(device)]


def collated(examples: list[Any]) -> Any:
    """Make a batch of a list of examples; lists of numbers in mappings become tensors before.

    Raises:
        DataError: examples have different sizes.
    """
    if all(isinstance(each, Mapping) for each in examples):
        examples = [{name: _as_tensor(part) for name, part in each.items()} for each in examples]
        for name in examples[0]:
            parts = [each.get(name) for each in examples]
            shapes = {tuple(part.shape) for part in parts if isinstance(part, Tensor)}
            if len(shapes) > 1:
                sizes = " and ".join(map(str, sorted(shapes)[:2]))
                raise DataError(
                    f"examples of a batch have different sizes: {name} of {sizes}. Pad all to one "
                    'length (of a tokenizer padding="max_length"), or give a DataLoader whose '
                    "collate_fn pads a batch (of transformers DataCollatorWithPadding(tokenizer))"
                )
    return default_collate(examples)


def _as_tensor(part: Any) -> Any:
    """Return a list of numbers, or of such lists, as a tensor, as tokenizers give them."""
    if isinstance(part, list):
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # of texts, or uneven lists
            return torch.tensor(part)
    return part


@dataclass(frozen=True, eq=False)
class Loaded:
    """Examples read one by one from a torch dataset, by a DataLoader.

    Attributes:
        dataset: a map-style dataset of (inputs, target), or of mappings that hold their labels.
        workers: worker processes that read; 0 to read in this process.
        augmented: dataset of the same examples with random augmentation, if any.
        collate: function that makes a batch of a list of examples.
    """

    dataset: Dataset
    workers: int = 0
    augmented: Dataset | None = None
    collate: Callable[[list[Any]], Any] = collated

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        augment: bool = False,
        part: Share = WHOLE,
    ) -> Iterator[Batch]:
        """See ``Split.batches``."""
        shuffled = generator is not None
        order: Sampler[int] = (
            RandomSampler(self, generator=generator) if shuffled else SequentialSampler(self)
        )
        batches = BatchSampler(order, batch_size, drop_last=shuffled and len(self) >= batch_size)
        loader: DataLoader = DataLoader(
            _wanted(self.augmented, augment) or self.dataset,
            batch_sampler=_Parts(batches, part),
            # Else the loader would draw from the global generator, which the gates' noise uses.
            generator=generator or torch.Generator(),
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=torch.device(device).type == "cuda",
        )
        for batch in _read(loader):
            inputs, targets = inputs_and_targets(batch)
            is_plain = targets is not None and not isinstance(targets, Mapping)
            tensors = torch.as_tensor(targets) if is_plain else targets
            yield to_device(inputs, device), to_device(tensors, device)

    def example(self, count: int) -> Any:
        """See ``Split.example``."""
        examples = [self.dataset[index] for index in range(min(count, len(self)))]
        return to_device(without_labels(inputs_and_targets(self.collate(examples))[0]), "cpu")


def sampled(split: Split, most: int) -> Split:
    """Return a split of at most ``most`` examples, drawn at random with a fixed seed.

    Splits of other classes than those of this module are returned whole.
    """
    if len(split) <= most:
        return split
    drawn = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:most]
    return chosen(split, drawn)


def chosen(split: Split, index: Tensor) -> Split:
    """Return a split of the examples at these indices; splits of other classes whole."""
    if isinstance(split, Tensors):
        return replace(split, inputs=split.inputs[index], targets=split.targets[index])
    if isinstance(split, Loaded):
        part = Subset(split.dataset, index.sort().values.tolist())
        varied = None if split.augmented is None else Subset(split.augmented, part.indices)
        return Loaded(part, split.workers, varied, split.collate)
    return split


class _Parts(Sampler[list[int]]):
    """Sampler of one part of each batch, so that no process reads the examples of others."""

    def __init__(self, batches: BatchSampler, part: Share) -> None:
        self._batches, self._part = batches, part

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[part_slice(len(batch), self._part)]


def _read(loader: DataLoader) -> Iterator[Batch]:
    batches, failure = iter(loader), ""
    while not failure:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except OSError as error:
            # A worker process sends its whole traceback, with the error itself at the end.
            failure = str(error).strip().splitlines()[-1]
            # Its frames reference the workers, which end at once only without references.
            traceback.clear_frames(error.__traceback__)
        else:
            yield batch
    del batches
    raise DataError(f"an example cannot be read: {failure}")


def _wanted(augmentation: Any, augment: bool) -> Any:
    if augment and augmentation is None:
        raise UsageError(
            "this data source has no augmentation of its own: leave augment out, or let your own "
            "dataset augment"
        )
    return augmentation if augment else None


@dataclass(frozen=True, eq=False)
class Data:
    """A data source.

    Attributes:
        name: as the user named it.
        train: training examples; their number is N.
        test: test examples.
        classes: number of classes; 0 where the targets are no classes.
        preprocessing: of its images, for the report and the files; None where unknown.
    """

    name: str
    train: Split
    test: Split
    classes: int
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        for part, split in (("training", self.train), ("test", self.test)):
            if not len(split):
                raise DataError(f"{self.name} holds no {part} examples.")
            if not self.classes or not isinstance(split, Tensors):
                continue
            if (largest := int(split.targets.max())) >= self.classes:
                raise DataError(
                    f"{self.name} is said to have {self.classes} classes, but a {part} label is "
                    f"{largest}; the last class is number {self.classes - 1}."
                )

    @property
    def n_train(self) -> int:
        """N, the number of training examples."""
        return len(self.train)

    def check_fits(self, outputs: int) -> None:
        """Refuse a model with fewer outputs than the data has classes.

        Raises:
            DataError: labels would exceed the model's classes.
        """
        if outputs < self.classes:
            raise DataError(
                f"{self.name} has {self.classes} classes, but the model has {outputs} outputs. "
                "Use a model whose last layer has one output for each class, or other data."
            )
