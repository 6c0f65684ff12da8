"""Selection between booleans by logical operators: ONNX Runtime lacks ``Where`` for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from l0prune.infer.nodes import operator_name

_ATEN = torch.ops.aten
_NAMES = ("aten.where", "aten.masked_fill", "aten.masked_fill_")


def chooses(node: Node) -> bool:
    """Return whether the node selects between booleans."""
    if operator_name(node.target) not in _NAMES:
        return False
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    """Select x where the condition holds, else y; for booleans only."""
    if x.dtype != torch.bool or y.dtype != torch.bool:
        return NotImplemented
    return (condition & x) | (~condition & y)


def _masked_fill(x: Tensor, mask: Tensor, value: Tensor | bool) -> Any:
    """Fill with the value where the mask holds; for booleans only."""
    if x.dtype != torch.bool:
        return NotImplemented
    if isinstance(value, Tensor):
        return (mask & value.bool()) | (~mask & x)
    return x | mask if value else x & ~mask


CHOICES: dict[Any, Callable[..., Any]] = {
    _ATEN.where.self: _where,
    _ATEN.masked_fill.Scalar: _masked_fill,
    _ATEN.masked_fill.Tensor: _masked_fill,
}
