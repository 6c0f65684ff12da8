"""Sliding windows: the dims that they go over stay whole, channels are carried through them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.expressions import Const, prod
from l0prune.infer.nodes import shape_of
from l0prune.infer.registry import Value, each, rule
from l0prune.infer.rules.movement import source

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference

_WINDOWS = "it is cut into sliding windows"


@rule("aten.unfold", zero=each)
def unfold(infer: Inference, node: Node) -> Value:
    """Windows over one dim: their number takes its place, their length comes last."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    dim = int(node.args[1]) % len(dims)  # type: ignore[arg-type]
    infer.solver.pin(dims[dim], _WINDOWS)
    count, length = Const(shape[dim], "sliding windows"), Const(shape[-1], "a sliding window")
    return (*dims[:dim], count, *dims[dim + 1 :], length)


@rule("aten.im2col", zero=each)
def im2col(infer: Inference, node: Node) -> Value:
    """``(…, c, h, w)`` to ``(…, c × places in a window, windows)``."""
    *batch, channel, height, width = infer.dims(source(node))
    for dim in (height, width):
        infer.solver.pin(dim, _WINDOWS)
    columns, windows = (shape_of(node) or [])[-2:]
    inside = Const(columns // channel.size, "a sliding window")
    return (*batch, prod((channel, inside)), Const(windows, "sliding windows"))


@rule("aten.col2im", zero=each)
def col2im(infer: Inference, node: Node) -> Value:
    """``(…, c × places in a window, windows)`` to ``(…, c, h, w)``, where windows overlap added."""
    *batch, columns, windows = infer.dims(source(node))
    channels, height, width = (shape_of(node) or [])[-3:]
    channel, inside = infer.solver.factor(columns, channels)
    for dim in (inside, windows):
        infer.solver.pin(dim, "it is put together from sliding windows")
    spatial = (Const(size, "a spatial dimension") for size in (height, width))
    return (*batch, channel, *spatial)
