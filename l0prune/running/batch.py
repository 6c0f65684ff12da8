"""A batch, whole or in part: what a step computes on, and how much of the mean it counts.

Calling a model on the inputs of a batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l0prune.capture.copying import inside
from l0prune.data.dataset import LABELS, Share, as_arguments, examples_in, share_of
from l0prune.errors import DataError
from l0prune.running.task import are_lists, batch_length


class Batch(NamedTuple):
    """Examples to compute on.

    Attributes:
        inputs: a tensor, a tuple of positional or a dict of keyword arguments of the model.
        targets: what the loss compares the outputs with.
        weight: what the mean over these examples counts in the mean over all parts of the whole
            batch: their number over that of a mean part. 1 for a whole batch or an equal part,
            0 for an example that is computed along, but is another part's.
    """

    inputs: Any
    targets: Any
    weight: float = 1.0

    @property
    def examples(self) -> int:
        """Number of examples that count."""
        return batch_length(self.inputs, self.targets) if self.weight else 0

    def part(self, part: Share) -> Batch:
        """This part of it, with what it counts among the parts of this batch.

        Raises:
            DataError: it has tensors of other lengths than it has examples.
        """
        if part[1] == 1:
            return self
        length = batch_length(self.inputs, self.targets)
        where = share_of(length, part)
        weight = self.weight * weight_of(length, part)
        if are_lists(self.inputs, self.targets):
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
        """It in so many parts, one after another."""
        return (self.part((number, count)) for number in range(count))

    def begin(self, most: int) -> Batch:
        """About so many of its examples and no more, the first; all where it cannot be divided."""
        length = batch_length(self.inputs, self.targets)
        try:
            return self.part((0, max(1, math.ceil(length / most))))
        except DataError:
            return self


def weight_of(length: int, part: Share) -> float:
    """The number of examples in this part of so many, over that of a mean part."""
    return examples_in(length, part) * part[1] / length


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's outputs: a tuple is its positional arguments, a mapping its keyword ones.

    Labels among the inputs are passed on only where the model's forward has a place for them.

    Raises:
        DataError: the inputs have names that the forward has not.
    """
    args, kwargs = as_arguments(inputs)
    return model(*args, **_fitting(model, kwargs))


def _fitting(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments that the model takes."""
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
    """The names of forward's parameters in order; None where it takes any, or cannot be told."""
    forward = type(model).forward
    return None if forward is nn.Module.forward else _names_of(forward)


@lru_cache(maxsize=64)
def _names_of(forward: Callable[..., Any]) -> dict[str, None] | None:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return dict.fromkeys(each.name for each in parameters if each.kind in kinds)
