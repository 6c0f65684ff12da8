"""Plain data with tensors in it, as JSON beside a set of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.files.tensor_file import DTYPES, each_once


class Stored(NamedTuple):
    """Tensors as a tensor file holds them: each once, of its dtypes, with notes on the rest.

    Attributes:
        tensors: by name, as they are stored.
        ties: further names of tensors that are stored under another one.
        notes: for a tensor that is stored in another way, what it really is: ``dtype`` and
            ``shape`` where it is stored as bytes, ``order`` where its dims are permuted.
    """

    tensors: dict[str, Tensor]
    ties: dict[str, str]
    notes: dict[str, dict[str, Any]]

    @staticmethod
    def of(given: Mapping[str, Tensor]) -> Stored:
        """These tensors, which must be ``storable``."""
        tensors, ties = each_once(given)
        stored, notes = {}, {}
        for name, tensor in tensors.items():
            stored[name], note = _noted(tensor.detach())
            if note:
                notes[name] = note
        return Stored(stored, ties, notes)

    def opened(self) -> dict[str, Tensor]:
        """The tensors by all their names, as they were given; tied ones are one object.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: notes or ties do not fit the tensors.
        """
        found = {name: _as_noted(t, self.notes.get(name, {})) for name, t in self.tensors.items()}
        return {**found, **{name: found[other] for name, other in self.ties.items()}}


def storable(tensor: Tensor) -> Tensor:
    """The tensor; TypeError where it has no entries that a file could hold."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError("a tensor without ordinary entries (on the meta device, sparse, …)")
    return tensor


def _noted(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    note: dict[str, Any] = {}
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
        note["order"] = order
        tensor = tensor.permute(order)
    if tensor.dtype not in DTYPES:
        note |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        tensor = tensor.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return tensor, note


def _as_noted(tensor: Tensor, note: Mapping[str, Any]) -> Tensor:
    if "dtype" in note:
        dtype = getattr(torch, note["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{note['dtype']!r} is no dtype")
        tensor = tensor.view(dtype).reshape(note["shape"])
    if "order" in note:
        order = note["order"]
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    return tensor


def encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """The value as JSON; tensors in it go into ``tensors``, under names that begin with ``name``.

    Raises:
        TypeError: it holds anything but tensors, numbers and text in tuples, lists and dicts.
    """
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
        tensors[name] = storable(value)
        return {"tensor": name}
    if type(value) in (tuple, list):
        parts = [encode(part, tensors, f"{name}.{number}") for number, part in enumerate(value)]
        return parts if type(value) is list else {"tuple": parts}
    if type(value) is dict:
        pairs = list(value.items())
        return {"dict": [encode(list(p), tensors, f"{name}.{n}") for n, p in enumerate(pairs)]}
    if type(value) is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in (int, float, bool, str, type(None)):
        return value
    raise TypeError(f"a {type(value).__name__}")


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of ``encode``.

    Raises:
        KeyError, TypeError, ValueError: the data is not what ``encode`` makes.
    """
    match data:
        case list(parts):
            return [decode(part, tensors) for part in parts]
        case {"tensor": str(name)}:
            return tensors[name]
        case {"tuple": list(parts)}:
            return tuple(decode(part, tensors) for part in parts)
        case {"dict": list(pairs)}:
            return dict(decode(pair, tensors) for pair in pairs)
        case {"complex": [str(real), str(imaginary)]}:
            return complex(float(real), float(imaginary))
        case {"float": str(text)}:
            return float(text)
        case int() | float() | str() | None:
            return data
    raise ValueError(f"{data!r} stands for nothing")
