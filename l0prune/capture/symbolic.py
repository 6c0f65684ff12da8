"""Captures with symbolic sizes: the batch, and others that are to be free."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_symbols

from l0prune.capture.batches import ANY, Batches, batch_of, batch_shapes, widened
from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.capture.left_behind import exported
from l0prune.capture.places import noted_places


@dataclass(frozen=True)
class Found:
    """A capture with symbolic sizes, if there is one.

    Attributes:
        program: the capture.
        batches: those that it is for, if their size is symbolic.
        is_free: whether it is.
        why_fixed: the line of code at which torch took a size for a number, the batch's if that is
            not free, or what torch said; a clause.
        multiple: where there is none, what the batch has to be a multiple of.
    """

    program: ExportedProgram | None = None
    batches: Batches = ANY
    is_free: bool = False
    why_fixed: str = ""
    multiple: int = 1


def with_symbols(model: nn.Module, example: Inputs, free: FreeSizes) -> Found:
    """The capture with a symbolic batch and ``free`` sizes, or with what of it is possible."""
    found = first = _with_batch(model, example, free)
    if free and first.program is None:
        found = _with_batch(model, example, ALL_FIXED)
        if found.program is None:
            found = _tried(model, example, free, None)
    return found if found.is_free else replace(found, why_fixed=first.why_fixed)


def _with_batch(model: nn.Module, example: Inputs, free: FreeSizes) -> Found:
    """With a symbolic batch.

    torch.export says of what it has to be a multiple, if the example's is more than once that.
    """
    found = _tried(model, example, free, ANY)
    multiple = found.multiple
    if found.program is None and multiple == 1:
        size = Batches(multiple=batch_of(*example))
        multiple = _tried(model, widened(*example, size), free, ANY).multiple
    if multiple > 1:
        found = replace(
            _tried(model, example, free, Batches(multiple, multiple)), why_fixed=found.why_fixed
        )
    return found


def _tried(model: nn.Module, example: Inputs, free: FreeSizes, batches: Batches | None) -> Found:
    """With such a batch, or with that of the example."""
    args, kwargs = widened(*example, batches) if batches else example
    with noted_places() as places:
        try:
            shapes = batch_shapes(model, args, kwargs, batches, free)
            program = exported(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # the static capture comes next, and reports it
            said = re.search(r"\bbatch = (\d+)\*_batch\b", str(error))
            why = _at(places.decisive) or _said(error)
            return Found(why_fixed=why, multiple=int(said[1]) if said else 1)
    return Found(program, batches or ANY, batches is not None, _at(places.decisive))


def _at(place: str) -> str:
    return f"the model's code fixes it at {place}" if place else ""


def _said(error: Exception) -> str:
    """Return the first line of torch's own words, as a clause."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"torch.export says {type(error).__name__}: {first.rstrip('.')}"


def inputs_of(program: ExportedProgram) -> list[Any]:
    """What a program was captured with: a fake tensor, a symbolic number, or any other value."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    given: tuple[Any, ...] = program.graph_signature.user_inputs
    return [nodes[each].meta.get("val") if each in nodes else each for each in given]


def symbolic(program: ExportedProgram, free: FreeSizes) -> frozenset[str]:
    """Names of the free sizes that are symbolic wherever they are in the inputs of a program."""
    fixed = {
        name
        for value, dims in zip(inputs_of(program), free.dims, strict=False)
        for dim, name in dims.items()
        if not isinstance(value, Tensor) or not free_symbols(value.shape[dim])
    }
    return frozenset(free.names) - fixed
