"""Parts of a network's outputs that count alike, whatever their sizes and units.

Each of several outputs is a part; and where the last thing that a network does is to join tensors,
as a detector's corners in pixels and its scores of classes, each of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from l0prune.capture.compat import TorchDispatchMode
from l0prune.data.dataset import map_tensors
from l0prune.running.batches import call
from l0prune.running.criteria import measured, tensor_output

Part = tuple[slice, ...]  # along all dims of an output
Parts = tuple[tuple[Part, ...], ...]  # of each output those that it is joined of, () for a whole
STILL = 1e-8  # part of its mean square that the variance of an output is rounding below
_ATEN = torch.ops.aten
_AS_IT_IS = (_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default)


def parts_of(network: nn.Module, batch: Any, names: Sequence[str] = ()) -> Parts:
    """Return the parts of a network's outputs for a batch, in eval mode.

    ``names`` are those of the outputs that matter; see ``measured``.
    """
    with torch.no_grad(), _Joins() as joins:
        outputs = call(network, batch)
        return tuple(joins.of(tensor) for tensor in _tensors(measured(outputs, names)))


def apart(outputs: Any, parts: Parts = ()) -> list[Tensor]:
    """Return the parts of outputs; those of several in rows, one for each example."""
    tensors = _tensors(outputs)
    found = list[Tensor]()
    for number, tensor in enumerate(tensors):
        pieces = [tensor[each] for each in _fitting(tensor, parts[number : number + 1])] or [tensor]
        found += pieces if len(tensors) == 1 else [p.reshape(len(p), -1) for p in pieces]
    return found


def numbered(outputs: Any, parts: Parts = ()) -> Tensor | None:
    """Return the number of the part of each number in a row of ``joined`` outputs.

    Shape: (numbers,), int64 on the CPU; None where all are of one part.
    """
    tensors = _tensors(outputs)
    cuts = [_fitting(each, parts[n : n + 1]) for n, each in enumerate(tensors)]
    if len(tensors) < 2 and not any(cuts):
        return None
    found, count = list[Tensor](), 0
    for tensor, cut in zip(tensors, cuts, strict=True):
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
    if found is not None:
        return [torch.atleast_1d(found)]
    each = list[Tensor]()
    map_tensors(outputs, each.append)
    return [tensor for tensor in each if tensor.is_floating_point() and tensor.dim()]


def _fitting(tensor: Tensor, parts: Parts) -> tuple[Part, ...]:
    """Return the parts of an output if they are its own: it may have other sizes by now."""
    found = parts[0] if parts else ()
    is_whole = all(
        max(each[dim].stop for each in found) == size
        for dim, size in enumerate(tensor.shape)
        if dim and found
    )
    return tuple((slice(None), *each[1:]) for each in found) if is_whole else ()


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
