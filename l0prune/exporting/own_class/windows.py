"""What windows do to the sizes of positions: a convolution, a pool."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch.fx import Node

from l0prune.files.pretrained.cut_layers import Window
from l0prune.infer.nodes import arguments, operator_name, shape_of

_POOLS = tuple(f"aten.{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3))
_CONVOLUTIONS = (*(f"aten.conv{n}d" for n in (1, 2, 3)), "aten.convolution")
_MOST = 8  # ways side by side: those of one block lead to the same sizes


def windows_to(end: Node, start: Node, between: Set[Node]) -> list[tuple[Window, ...]]:
    """The windows by which positions of one node come to those of another: some of the ways.

    Paths side by side are ways of their own, and so is a mean over all positions that multiplies
    the others: of its sizes nothing is left.

    Args:
        end: what is made of ``start``, by ``between``, itself among these.
        start: of other nodes.
        between: operators.
    """
    ways: dict[Node, list[tuple[Window, ...]]] = {start: [()]}
    for node in sorted(between):
        own = _windows(node)
        before = [way for each in node.all_input_nodes for way in ways.get(each, ())]
        if own is not None and before:
            ways[node] = list(dict.fromkeys((*way, *own) for way in before))[:_MOST]
    return ways.get(end, [])


def _windows(node: Node) -> tuple[Window, ...] | None:
    """The one that changes the sizes of positions here, if there is one.

    None where they change in another way than by kernel, stride, padding and dilation.
    """
    name = operator_name(node.target)
    if name not in _CONVOLUTIONS + _POOLS:
        return ()
    given = arguments(node)
    if given.get("transposed") or given.get("ceil_mode"):
        return None
    window = _window(given, name in _CONVOLUTIONS)
    stays = all(s == 1 and 2 * p == d * (k - 1) for k, s, p, d in zip(*window, strict=True))
    return () if stays else (window,)


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
