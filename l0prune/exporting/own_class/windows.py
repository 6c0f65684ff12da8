"""What windows do to the sizes of positions: a convolution, a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Node

from l0prune.files.pretrained.cut_layers import Window
from l0prune.infer.nodes import arguments, operator_name, shape_of

_POOLS = tuple(f"aten.{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3))
_CONVOLUTIONS = (*(f"aten.conv{n}d" for n in (1, 2, 3)), "aten.convolution")


def windows_of(nodes: Iterable[Node]) -> tuple[Window, ...] | None:
    """Those among these operators that change the sizes of positions, in their order.

    None where one of them does so in another way than by kernel, stride, padding and dilation.
    """
    found = []
    for node in sorted(nodes):
        name = operator_name(node.target)
        if name not in _CONVOLUTIONS + _POOLS:
            continue
        given = arguments(node)
        if given.get("transposed") or given.get("ceil_mode"):
            return None
        window = _window(given, name in _CONVOLUTIONS)
        if any(s != 1 or 2 * p != d * (k - 1) for k, s, p, d in zip(*window, strict=True)):
            found.append(window)
    return tuple(found)


def _window(given: dict[str, Any], is_convolution: bool) -> Window:
    kernel = (shape_of(given["weight"]) or [])[2:] if is_convolution else given["kernel_size"]
    dims = len(kernel)
    stride, dilation = _each(given["stride"] or kernel, dims), _each(given.get("dilation", 1), dims)
    padding = given["padding"]
    if padding == "same":  # sizes stay, as torch allows no stride then
        kernel, padding = (1,) * dims, 0
    return (tuple(kernel), stride, _each(0 if padding == "valid" else padding, dims), dilation)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each dim."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
