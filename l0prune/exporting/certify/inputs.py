"""Inputs and sizes for the comparisons of a certificate: like the example's, if the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.capture import Captured, capture
from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import examples_in, first_rows
from l0prune.capture.sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.exporting.certify.answers import is_valid, output_as_it_is
from l0prune.exporting.certify.certificate import LARGEST
from l0prune.exporting.certify.difference import difference
from l0prune.infer.nodes import shape_of
from l0prune.progress.stages import stage

_NOISE = 0.1
NO_SIZES: Mapping[str, int] = {}


def trials(
    example: Inputs,
    batches: Sequence[int | None],
    free: FreeSizes = ALL_FIXED,
    sizes: Sequence[Mapping[str, int]] = ({},),
) -> Iterator[tuple[Inputs, ...]]:
    """Yield tuples of inputs of these batch sizes, the kind least like the example first.

    If other sizes are ``free``, the inputs take turns through ``sizes``.

    Not every model takes all values: a mask may not be empty in a row, a logarithm needs positive
    numbers, and the edges of a graph refer to its nodes.
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
    """Draw random inputs like the example's, with another batch size, or other sizes, if given.

    Floats are normal with the example's mean and deviation; other numbers are drawn from the
    example's, since only those are known to be valid (token ids, masks).
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
    """Draw rows of the example with replacement, and change each float by about 10%."""
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
    """Apply ``change`` to each leaf of the example, with the names of its free dims."""
    leaves, structure = pytree.tree_flatten(example)
    changed = [change(leaf, free.of(number)) for number, leaf in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(changed, structure)
    return args, kwargs


Sizes = tuple[Mapping[str, int], ...]

_OTHERS = 2  # beside the example's


@stage("looking for input sizes that the model takes")
def sizes_taken(gated: nn.Module, example: Inputs, free: FreeSizes) -> Sizes:
    """Find sizes of the free dims that the model takes, up to two choices; the example's first.

    A file is timed with the first. An image's size may have to be a multiple, a text's has a
    maximum. So a few sizes are tried for each name, with the others as in the example.
    """
    own = free.sizes(example)
    others = {name: _others(gated, example, free, name) for name in own}
    every = [
        {name: found[number] for name, found in others.items() if len(found) > number}
        for number in range(_OTHERS)
    ]
    return (own, *({**own, **sizes} for sizes in every if sizes))


def _others(gated: nn.Module, example: Inputs, free: FreeSizes, name: str) -> list[int]:
    own = free.sizes(example)
    size, found = own[name], list[int]()
    for other in dict.fromkeys((1, 2 * size, size + 1, size + size // 2, size // 2)):
        if len(found) < _OTHERS and other not in (size, 0):
            given = fresh_inputs(example, None, 0, free, {**own, name: other})
            found += [other] if is_valid(gated, given) else []
    return found


def with_free_batch(model: nn.Module, example: Inputs, free: FreeSizes = ALL_FIXED) -> Captured:
    """Capture a model in eval mode with a free batch size, if torch.export can.

    Those of the ``free`` sizes that can be free are so, too.

    torch.export traces a batch of two or more, and assumes the same path for one example. If that
    is wrong (``if x.shape[0] == 1``, ``x.squeeze()``), the graph is for two or more; or, if the
    example is a batch of one, for one only.

    Raises:
        CaptureError: torch.export cannot follow the model.
    """
    captured = capture(model, *example, dynamic_batch=True, free=free)
    if not captured.dynamic or _holds_for_one(model, captured, example):
        return captured
    if examples_in(example) == captured.batches.multiple:
        return capture(model, *example)
    return replace(captured, batches=captured.batches.several())


def _holds_for_one(model: nn.Module, captured: Captured, example: Inputs) -> bool:
    """Return whether the graph is right for the first example, or group of examples, alone.

    This is a coarse check; the certificate compares exactly.
    """
    if _keeps_batch_in_files(captured):
        return False
    single = first_rows(example, captured.batches.multiple)
    graph = captured.program.module(check_guards=False)
    try:
        expected, found = (output_as_it_is(module, single) for module in (model, graph))
    except Exception:  # one of them cannot run on it
        return False
    return difference(expected, found) <= LARGEST


def _keeps_batch_in_files(captured: Captured) -> bool:
    """Return whether files keep a batch of one that the graph squeezes away with other dims.

    Exporters name the dims of ``x.squeeze()`` where some are always 1: the batch is none of these.
    """
    squeezes = captured.graph.find_nodes(op="call_function", target=torch.ops.aten.squeeze.default)
    return any(1 in (shape_of(node.all_input_nodes[0]) or ()) for node in squeezes)
