"""Noting what submodules receive and return while their model runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l0prune.capture.held_inputs import call
from l0prune.capture.model_checks import evaluating
from l0prune.capture.sizes import Inputs, batch_of


def examples_in(inputs: Inputs) -> int:
    """Size of dim 0 of the first tensor that has one; 1 where none has."""
    return batch_of(*inputs) or 1


def examples_given(example: Inputs) -> int:
    """Examples in the inputs of a whole model: detectors take a list with one image for each."""
    images = _first_list(example)
    return examples_in(example) if images is None else max(len(images), 1)


def first_of(example: Inputs) -> Inputs:
    """The first of the examples that a whole model is given, as a batch of its own."""
    images = _first_list(example)
    if images is None:
        return first_rows(example)

    def first(value: Any) -> Any:
        is_alike = isinstance(value, list | tuple) and len(value) == len(images)
        return value[:1] if is_alike else value

    args, kwargs = example
    return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


def first_rows(example: Inputs, number: int = 1) -> Inputs:
    """The first rows of every tensor that has one for each example."""
    size = examples_in(example)

    def first(leaf: Tensor) -> Tensor:
        return leaf[:number] if leaf.ndim and leaf.shape[0] == size else leaf

    args, kwargs = pytree.tree_map_only(Tensor, first, example)
    return args, kwargs


def _first_list(example: Inputs) -> Sequence[Tensor] | None:
    """The first input where it is a list of tensors."""
    args, kwargs = example
    first = next(iter((*args, *kwargs.values())), None)
    is_list = isinstance(first, list | tuple) and all(isinstance(each, Tensor) for each in first)
    return first if is_list else None


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Attributes:
        path: of the submodule; empty for the model itself.
        inputs: what it received, copied before it could write into it.
        output: what it returned.
    """

    path: str
    inputs: Inputs
    output: Any


def record(model: nn.Module, paths: Iterable[str], inputs: Inputs) -> list[Call]:
    """Run the model in eval mode; every call of the submodules at ``paths``, in order of return."""
    calls: list[Call] = []
    waiting: dict[str, list[Inputs]] = defaultdict(list)
    handles = []
    for path in paths:

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            waiting[path].append(_copied((args, kwargs)))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            calls.append(Call(path, waiting[path].pop(), _copied(output)))

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with evaluating(model), torch.random.fork_rng(devices=[]):
            call(model, _copied(inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def filled(inputs: Inputs, rows: int = 2) -> Inputs:
    """The inputs with a few random rows where they had none: a detector that has found nothing."""
    generator = torch.Generator().manual_seed(0)

    def fill(leaf: Tensor) -> Tensor:
        if not leaf.ndim or leaf.shape[0]:
            return leaf
        return torch.randn(rows, *leaf.shape[1:], generator=generator).to(leaf)

    args, kwargs = pytree.tree_map_only(Tensor, fill, inputs)
    return args, kwargs


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)
