"""Parts of a network's outputs that count alike, whatever their sizes and units.

Each of several outputs is a part; and where the last thing that a network does is to join tensors,
as a detector's corners in pixels and its scores of classes, each of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from l0prune.capture.compat import TorchDispatchMode
from l0prune.running.batches import call
from l0prune.running.criteria import measured, several, tensor_output

Part = tuple[slice, ...]  # along all dims of an output
Parts = tuple[tuple[Part, ...], ...]  # of each output those that it is joined of, () for a whole
STILL = 1e-8  # part of its mean square that the variance of an output is rounding below
_ATEN = torch.ops.aten
_AS_IT_IS = (_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default)


def in_parts(network: nn.Module, batch: Any, names: Sequence[str] = ()) -> tuple[Any, Parts]:
    """Return a network's outputs for a batch, in eval mode, and the parts of those that matter.

    ``names`` are those of the latter; see ``measured``.
    """
    with torch.no_grad(), _Joins() as joins:
        outputs = call(network, batch)
        return outputs, tuple(joins.of(each) for each in _tensors(measured(outputs, names)))


def apart(outputs: Any, parts: Parts = ()) -> list[Tensor]:
    """Return the parts of outputs; those of several in rows, one for each example."""
    cuts, found = _cuts(outputs, parts), list[Tensor]()
    for tensor, cut in cuts:
        pieces = [tensor[each] for each in cut] or [tensor]
        found += pieces if len(cuts) == 1 else [p.reshape(len(p), -1) for p in pieces]
    return found


def numbered(outputs: Any, parts: Parts = ()) -> Tensor | None:
    """Return the number of the part of each number in a row of ``joined`` outputs.

    Shape: (numbers,), int64 on the CPU; None where all are of one part.
    """
    cuts = _cuts(outputs, parts)
    if len(cuts) < 2 and not any(cut for _, cut in cuts):
        return None
    found, count = list[Tensor](), 0
    for tensor, cut in cuts:
        own = torch.full((1, *tensor.shape[1:]), count)
        for number, each in enumerate(cut, count):
            own[:, *each[1:]] = number
        count += len(cut) or 1
        found.append(own.flatten())
    return torch.cat(found)


def units_of(rows: Tensor, of: Tensor) -> tuple[float, ...]:
    """Return the unit in which errors of each part's numbers count.

    In the units u_k of K parts of n_k numbers the mean square of all numbers is that of the parts,
    each over its variance: u_k² = σ_k²·n_k·K / Σn. A part that does not vary, as that of one
    example, counts over its mean square.

    Args:
        rows: answers as ``joined``, shape (examples, numbers).
        of: see ``numbered``.
    """
    units, count = [], int(of.max()) + 1
    for number in range(count):
        part = rows[:, (of == number).to(rows.device)].detach().double()
        square = part.square().mean()
        variance = part.var(0, correction=0).mean()
        found = variance if variance > STILL * square else square
        units.append(math.sqrt(found * part.shape[1] * count / rows.shape[1]) or 1.0)
    return tuple(units)


def in_units(rows: Tensor, of: Tensor, units: Sequence[float]) -> Tensor:
    """Return joined outputs in units; see ``units_of``."""
    return rows / torch.tensor(units).to(rows)[of.to(rows.device)]


def _tensors(outputs: Any) -> list[Tensor]:
    """Return the outputs that hold no whole numbers, as ``joined`` puts them into rows."""
    found = tensor_output(outputs)
    return several(outputs) if found is None else [torch.atleast_1d(found)]


def _cuts(outputs: Any, parts: Parts) -> list[tuple[Tensor, tuple[Part, ...]]]:
    """Return each output with the parts that it has; it may have other sizes by now."""
    return [
        (tensor, tuple((slice(None), *each[1:]) for each in cut) if _fits(tensor, cut) else ())
        for tensor, cut in zip(_tensors(outputs), chain(parts, repeat(())), strict=False)
    ]


def _fits(tensor: Tensor, cut: tuple[Part, ...]) -> bool:
    """Return whether parts are those of all of a tensor, whatever the number of its examples."""
    ends = ([each[dim].stop for each in cut] for dim in range(1, tensor.dim()))
    return bool(cut) and [*map(max, ends)] == [*tensor.shape[1:]]


class _Joins(TorchDispatchMode):
    """Note of what tensors are joined of, but for examples."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, tuple[ref[Tensor], tuple[Part, ...]]] = {}

    def of(self, tensor: Tensor) -> tuple[Part, ...]:
        """Return the parts of a tensor; () if it is not joined."""
        made, parts = self._parts.get(id(tensor), (None, ()))
        return parts if made is not None and made() is tensor else ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        parts: tuple[Part, ...] = ()
        if func is _ATEN.cat.default:
            parts = self._joined(args[0], (args[1] if len(args) > 1 else 0) % result.dim())
        elif func in (_ATEN.permute.default, _ATEN.transpose.int) or func in _AS_IT_IS:
            order = list(range(result.dim()))
            if func is _ATEN.permute.default:
                order = [dim % result.dim() for dim in args[1]]
            elif func is _ATEN.transpose.int:
                one, other = (dim % result.dim() for dim in args[1:])
                order[one], order[other] = other, one
            if order[:1] != [0]:
                return result
            parts = tuple(tuple(each[dim] for dim in order) for each in self.of(args[0]))
        if parts:
            self._parts[id(result)] = ref(result), parts
        return result

    def _joined(self, tensors: Sequence[Tensor], dim: int) -> tuple[Part, ...]:
        if not dim or len(tensors) < 2:
            return ()
        found, begin = list[Part](), 0
        for tensor in tensors:
            whole = tuple(slice(0, size) for size in tensor.shape)
            for part in self.of(tensor) or (whole,):
                moved = slice(part[dim].start + begin, part[dim].stop + begin)
                found.append((*part[:dim], moved, *part[dim + 1 :]))
            begin += tensor.shape[dim]
        return tuple(found)
