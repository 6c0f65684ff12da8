"""Reading facts off graph nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def operator_name(target: Any) -> str:
    """``aten.conv2d`` for the overload ``aten.conv2d.default``; a function's own name else."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}"
    return getattr(target, "__name__", str(target))


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def operands_of(node: Node) -> Iterator[Node]:
    """Every node among the arguments, in order."""
    return iter(node.all_input_nodes)


def hint(size: Any) -> int:
    """A size as a number; a symbolic one as it was in the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def shape_of(node: Node) -> list[int] | None:
    """The shape of a node's tensor, None if it is none."""
    value = node.meta.get("val")
    return [hint(size) for size in value.shape] if isinstance(value, Tensor) else None


def has_tensor(node: Node) -> bool:
    """Whether the node yields at least one tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) for v in values)


def is_pointwise(node: Node) -> bool:
    """Whether torch itself tags the operator as elementwise."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def dim_order(node: Node, rank: int) -> list[int]:
    """For t, transpose and permute: which source dim each output dim is."""
    name = operator_name(node.target)
    if name == "aten.numpy_T":
        return list(reversed(range(rank)))
    if name == "aten.permute":
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(rank))
    if rank > 1:
        a, b = (0, 1) if name == "aten.t" else node.args[1:3]
        a, b = int(a) % rank, int(b) % rank  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return order
