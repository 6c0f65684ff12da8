"""What a batch may hold: tensors, in mappings and lists of any kind, as a model's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def plain(part: Any, change: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
    """A part of a batch in dicts and tuples, whatever kind of mapping or list it came in.

    A tokenizer's ``BatchEncoding`` is a dict afterwards. Each tensor goes through ``change``.
    """
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, Mapping):
        return {name: plain(value, change) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(plain(value, change) for value in part)
    return part


def moved(part: Any, device: torch.device | str) -> Any:
    """A part of a batch with every tensor on ``device``."""
    return plain(part, lambda tensor: tensor.to(device, non_blocking=True))


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model: a tuple is the former, a mapping the latter."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
