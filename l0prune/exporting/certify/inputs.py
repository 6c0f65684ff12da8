"""Inputs on which a certificate is given: like the example's, and such as the model can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l0prune.capture.recording import Inputs, examples_in

_NOISE = 0.1


def trials(example: Inputs, batches: Sequence[int | None]) -> Iterator[tuple[Inputs, ...]]:
    """Inputs of these batch sizes in several kinds, the least like the example first.

    Not every model takes every number: a mask has to leave each row something, a logarithm wants
    positive ones, and the edges of a graph belong to its nodes.
    """
    yield tuple(fresh_inputs(example, batch, seed) for seed, batch in enumerate(batches))
    yield tuple(_other_rows(example, batch, seed) for seed, batch in enumerate(batches))
    yield (example,)


def fresh_inputs(example: Inputs, batch: int | None, seed: int) -> Inputs:
    """Random inputs like the example's, with another batch size where one is given.

    Floats are normal with the example's mean and deviation; other numbers are drawn from those
    that occur in the example, since only they are sure to be valid (token ids, masks).
    """
    generator = torch.Generator().manual_seed(seed)
    size = examples_in(example)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.numel():
            return leaf
        shape = list(leaf.shape)
        if batch and shape and shape[0] == size:
            shape[0] = batch
        if not leaf.is_floating_point():
            chosen = torch.randint(leaf.numel(), shape, generator=generator)
            return leaf.cpu().flatten()[chosen]
        noise = torch.randn(shape, generator=generator)
        deviation = leaf.float().std() if leaf.numel() > 1 else torch.tensor(1.0)
        return (noise * deviation.cpu() + leaf.float().mean().cpu()).to(leaf.dtype)

    args, kwargs = pytree.tree_map(draw, example)
    return args, kwargs


def _other_rows(example: Inputs, batch: int | None, seed: int) -> Inputs:
    """The example's rows in another order and number, each float a little larger or smaller."""
    generator = torch.Generator().manual_seed(seed)
    size = examples_in(example)
    rows = torch.randint(size, (batch or size,), generator=generator)

    def pick(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        picked = leaf.cpu()[rows] if leaf.ndim and leaf.shape[0] == size else leaf.cpu()
        if not leaf.is_floating_point():
            return picked
        noise = torch.randn(picked.shape, generator=generator)
        return picked * (1 + _NOISE * noise.clamp(-3, 3)).to(leaf.dtype)

    args, kwargs = pytree.tree_map(pick, example)
    return args, kwargs
