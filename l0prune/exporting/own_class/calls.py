"""What calls of modules show: which input each can give back in place of its own work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l0prune.capture.copying import copied
from l0prune.capture.recording import Call, record
from l0prune.infer.parts import Part


@dataclass(frozen=True)
class Called:
    """A module, as it is called.

    Attributes:
        at: which of its inputs it can give back, those by position first: the one that is shaped
            as what it returns, a class token, say, beside all others; else the first.
        results: how many it returns in a tuple, 0 if it returns a tensor.
        shape: of what it returns; None if none of its inputs has that.
    """

    at: int
    results: int
    shape: tuple[int, ...] | None


def called(plain: nn.Module, paths: Iterable[str], part: Part) -> dict[str, Called]:
    """By path, modules that have something to give back.

    Those that return neither a tensor nor a tuple lack, and those that are given nothing to pass
    on: no tensor at all, or, where they hold no parameters and so cost little, a mask alone.
    """
    names = {path.removeprefix(f"{part.path}."): path for path in paths}
    with torch.no_grad():
        calls = record(copied(plain.get_submodule(part.path)), list(names), part.example)
    return {
        names[call.path]: _of(call)
        for call in calls
        if isinstance(call.output, Tensor) or type(call.output) is tuple
        if _is_given_some(call, plain.get_submodule(names[call.path]))
    }


def _is_given_some(call: Call, module: nn.Module) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(call.inputs) if isinstance(leaf, Tensor)]
    if any(True for _ in module.parameters()):
        return bool(tensors)
    return any(tensor.is_floating_point() for tensor in tensors)


def _of(call: Call) -> Called:
    results = 0 if isinstance(call.output, Tensor) else len(call.output)
    shape = _shape(call.output[0] if results else call.output)
    args, kwargs = call.inputs
    inputs = (*args, *kwargs.values())
    at = next((at for at, given in enumerate(inputs) if shape and _shape(given) == shape), None)
    return Called(0 if at is None else at, results, None if at is None else shape)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
