"""Calibration inputs of a file, in the form that ONNX Runtime takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from l0prune.capture.compat import pytree
from l0prune.capture.sizes import Inputs
from l0prune.data import Data
from l0prune.data.dataset import as_arguments, map_tensors, without_labels
from l0prune.errors import UsageError, warn
from l0prune.exporting.pieces import ExportedPart
from l0prune.features.int8.quantizer import Feed
from l0prune.running.task import Task, batch_length, is_split

EXAMPLES = 128  # taken from a data source
_FEW = 16
_TOGETHER = 4  # examples in a call
_COMPARED = 4  # one call in so many is held out for the comparison


def feeds_of(given: Any, piece: ExportedPart, names: Sequence[str]) -> list[Feed]:
    """Return the feeds of a file, of a few examples each where the batch is free.

    Args:
        given: data as ``finetune`` takes them, whose training examples are taken; or a batch of
            inputs: a tensor, a tuple of positional or a mapping of keyword arguments; or an
            iterable of such batches.
        piece: of the model, which the file was made from.
        names: of the file's inputs.

    Raises:
        UsageError: they are too few, do not fit the model, or hold numbers that are not finite.
    """
    if is_source(given):
        batches = _inputs_of(Task.of(given))
    elif isinstance(given, Tensor | tuple | Mapping):
        batches = iter((given,))
    else:
        batches = iter(given)
    example, feeds = piece.answers[0].inputs, list[Feed]()
    wanted = [torch.as_tensor(leaf) for leaf in piece.read(example)]
    for batch in batches:
        leaves = [torch.as_tensor(leaf) for leaf in piece.read(_arguments(batch, example))]
        _check_sizes(leaves, wanted, piece.sizes)
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.is_floating_point() and not leaf.isfinite().all():
                raise UsageError(
                    f"the calibration inputs hold NaN or infinite numbers ({name}): a range of "
                    "these is none. Leave such examples out"
                )
        feeds += _split(dict(zip(names, leaves, strict=True)), piece)
    if len(feeds) < 2:
        raise UsageError(
            "int8 needs several examples, some to calibrate with and others to compare: one says "
            "nothing of ranges. Give a hundred or so, such as the training data"
        )
    examples = rows_in(feeds, piece)
    if examples < _FEW:
        warn(
            f"int8 is calibrated with {examples} examples: ranges that so few show are too narrow "
            "for others. Give a hundred or so"
        )
    return feeds


def drawn(inputs: Any) -> Any:
    """Return ``EXAMPLES`` of a tensor or mapping of inputs, drawn at random; all if fewer.

    Batches stay as they are.
    """
    if isinstance(inputs, list):
        return inputs
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(batch_length(inputs, None), generator=generator)[:EXAMPLES]
    return map_tensors(inputs, lambda tensor: tensor[rows])


def divided(feeds: Sequence[Feed]) -> tuple[list[Feed], list[Feed]]:
    """Divide feeds into those to calibrate with and, one in four, those to compare with."""
    compared = {*range(_COMPARED - 1, len(feeds), _COMPARED)} or {len(feeds) - 1}
    seen = [feed for number, feed in enumerate(feeds) if number not in compared]
    return seen, [feeds[number] for number in sorted(compared)]


def rows_in(feeds: Sequence[Feed], piece: ExportedPart) -> int:
    """Count the examples of feeds."""
    place = next((i for i, dims in enumerate(piece.sizes) if dims.get(0) == "batch"), 0)
    return sum(len(np.atleast_1d([*feed.values()][place])) for feed in feeds)


def is_source(given: Any) -> bool:
    """Return whether this is data with targets, as ``finetune`` takes it, and not inputs alone.

    In a pair (training, test) neither part is an input of a model.
    """
    plain = Tensor | Mapping | tuple | bool | int | float | str | None
    is_pair = isinstance(given, tuple) and len(given) == 2
    return isinstance(given, Data | Task) or (
        is_pair and not any(isinstance(part, plain) for part in given)
    )


def _inputs_of(task: Task) -> Iterator[Any]:
    """Yield inputs of training examples, in any order, until ``EXAMPLES`` are reached."""
    if is_split(task.train):
        generator = torch.Generator().manual_seed(0)
        size = min(EXAMPLES, len(task.train))
        batches: Iterable[Any] = islice(task.train.batches(size, generator=generator), 1)
    else:
        batches = task.train
    examples = 0
    for inputs, targets in map(task.pair, batches):
        yield without_labels(inputs)
        examples += batch_length(inputs, targets)
        if examples >= EXAMPLES:
            return


def _arguments(batch: Any, example: Inputs) -> Inputs:
    """Return a batch as arguments of the model, in the order of its example inputs.

    Raises:
        UsageError: the arguments do not match the example inputs.
    """
    args, kwargs = as_arguments(batch)
    if kwargs and set(example[1]) <= set(kwargs):
        kwargs = {name: kwargs[name] for name in example[1]}
    wanted, found = pytree.tree_leaves(example), pytree.tree_leaves((args, kwargs))
    ranks = [[leaf.ndim if isinstance(leaf, Tensor) else 0 for leaf in x] for x in (wanted, found)]
    if ranks[0] != ranks[1]:
        raise UsageError(
            f"the calibration inputs do not fit the model: it was gated with {_shapes(wanted)}, "
            f"and these are {_shapes(found)}. Give batches of its inputs, without targets"
        )
    return args, kwargs


def _check_sizes(
    leaves: Sequence[Tensor], wanted: Sequence[Tensor], sizes: Sequence[Mapping[int, str]]
) -> None:
    """Raise UsageError where inputs differ from the example in a fixed size or kind of numbers."""
    for leaf, other, free in zip(leaves, wanted, sizes, strict=True):
        fixed = [dim for dim in range(1, other.ndim) if dim not in free]
        sizes_differ = any(leaf.shape[dim] != other.shape[dim] for dim in fixed)
        if sizes_differ or leaf.is_floating_point() != other.is_floating_point():
            given, asked = (f"{tuple(x.shape)} of {x.dtype}" for x in (leaf, other))
            raise UsageError(
                f"the calibration inputs do not fit the model: it was gated with {asked}, and "
                f"these are {given}. Prepare them as the model's inputs are (images of DIR "
                "at another size: imagefolder:DIR:SIZE)"
            )


def _shapes(leaves: Sequence[Any]) -> str:
    return ", ".join(str(tuple(getattr(leaf, "shape", ()))) for leaf in leaves) or "nothing"


def _split(batch: Mapping[str, Tensor], piece: ExportedPart) -> Iterator[Feed]:
    """Yield feeds of a few examples, or the whole batch where its size is not free."""
    free = [name for name, dims in zip(batch, piece.sizes, strict=True) if dims.get(0) == "batch"]
    length = len(batch[free[0]]) if free else 1
    most = min(_TOGETHER, max(1, length // _COMPARED))
    step = next(size for size in count(most) if size in piece.batches) if free else 1
    for start in range(0, length, step):
        if free and min(step, length - start) not in piece.batches:
            return
        rows = slice(start, start + step)
        yield {k: _array(value[rows] if k in free else value) for k, value in batch.items()}


def _array(value: Tensor) -> np.ndarray[Any, Any]:
    value = value.detach().cpu()
    return np.ascontiguousarray((value.float() if value.is_floating_point() else value).numpy())
