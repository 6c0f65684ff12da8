"""Inputs on which a certificate is given: like the example's, and such as the model can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.capture.recording import examples_in

_NOISE = 0.1
NO_SIZES: Mapping[str, int] = {}


def trials(
    example: Inputs,
    batches: Sequence[int | None],
    free: FreeSizes = ALL_FIXED,
    sizes: Sequence[Mapping[str, int]] = ({},),
) -> Iterator[tuple[Inputs, ...]]:
    """Inputs of these batch sizes in several kinds, the least like the example first.

    Where other sizes are ``free``, each of the inputs has another of ``sizes``.

    Not every model takes every number: a mask has to leave each row something, a logarithm wants
    positive ones, and the edges of a graph belong to its nodes.
    """
    for kind in (fresh_inputs, _other_rows):
        yield tuple(
            kind(example, batch, seed, free, sizes[seed % len(sizes)])
            for seed, batch in enumerate(batches)
        )
    yield (example,)


def fresh_inputs(
    example: Inputs,
    batch: int | None,
    seed: int,
    free: FreeSizes = ALL_FIXED,
    sizes: Mapping[str, int] = NO_SIZES,
) -> Inputs:
    """Random inputs like the example's, with another batch, or other sizes, where these are given.

    Floats are normal with the example's mean and deviation; other numbers are drawn from those
    that occur in the example, since only they are sure to be valid (token ids, masks).
    """
    generator = torch.Generator().manual_seed(seed)
    size = examples_in(example)

    def draw(leaf: Any, dims: Mapping[int, str]) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.numel():
            return leaf
        shape = list(leaf.shape)
        if batch and shape and shape[0] == size:
            shape[0] = batch
        for dim, name in dims.items():
            shape[dim] = sizes.get(name, shape[dim])
        if not leaf.is_floating_point():
            chosen = torch.randint(leaf.numel(), shape, generator=generator)
            return leaf.cpu().flatten()[chosen]
        noise = torch.randn(shape, generator=generator)
        deviation = leaf.float().std() if leaf.numel() > 1 else torch.tensor(1.0)
        return (noise * deviation.cpu() + leaf.float().mean().cpu()).to(leaf.dtype)

    return _mapped(draw, example, free)


def _other_rows(
    example: Inputs, batch: int | None, seed: int, free: FreeSizes, sizes: Mapping[str, int]
) -> Inputs:
    """The example's rows in another order and number, each float a little larger or smaller."""
    generator = torch.Generator().manual_seed(seed)
    size = examples_in(example)
    rows = torch.randint(size, (batch or size,), generator=generator)

    def pick(leaf: Any, dims: Mapping[int, str]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        picked = leaf.cpu()[rows] if leaf.ndim and leaf.shape[0] == size else leaf.cpu()
        for dim, name in dims.items():
            other = sizes.get(name, picked.shape[dim])
            if other != picked.shape[dim]:
                index = torch.randint(picked.shape[dim], (other,), generator=generator)
                picked = picked.index_select(dim, index)
        if not leaf.is_floating_point():
            return picked
        noise = torch.randn(picked.shape, generator=generator)
        return picked * (1 + _NOISE * noise.clamp(-3, 3)).to(leaf.dtype)

    return _mapped(pick, example, free)


def _mapped(
    change: Callable[[Any, Mapping[int, str]], Any], example: Inputs, free: FreeSizes
) -> Inputs:
    """The example with each leaf changed, which is given with its free dims."""
    leaves, structure = pytree.tree_flatten(example)
    changed = [change(leaf, free.of(number)) for number, leaf in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(changed, structure)
    return args, kwargs
