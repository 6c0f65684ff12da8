"""Pooling and interpolation: spatial dims change, channels are carried.

Sliding windows: the dims that they go over stay whole, channels are carried through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.fx import Node

from l0prune.infer.expressions import Const, prod
from l0prune.infer.nodes import shape_of
from l0prune.infer.registry import Value, each, rule
from l0prune.infer.rules.movement import source

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
_MODES = ("nearest", "bilinear", "bicubic", "linear", "trilinear", "_nearest_exact")


@rule(
    *(f"aten.{pool}{n}d" for pool in _POOLS for n in (1, 2, 3)),
    *(f"aten._{pool}{n}d" for pool in _POOLS for n in (1, 2, 3)),
    *(f"aten.{pool}{n}d_with_indices" for pool in _POOLS for n in (1, 2, 3)),
    *(f"aten.upsample_{mode}{n}d" for mode in _MODES for n in (1, 2, 3)),
    *(f"aten._upsample_{mode}{n}d" for mode in ("nearest_exact",) for n in (1, 2, 3)),
    *(f"aten._upsample_{mode}2d_aa" for mode in ("bilinear", "bicubic")),
    *(f"aten.{mode}_pad{n}d" for mode in ("reflection", "replication") for n in (1, 2, 3)),
    zero=each,
)
def pool(infer: Inference, node: Node) -> Value:
    """Windows over the spatial dims of each channel on its own."""
    dims = infer.dims(source(node))
    value = node.meta["val"]
    shape = shape_of(node) if isinstance(value, Tensor) else list(value[0].shape)
    # dims before the spatial ones are carried: an unbatched (c, h, w) has one, a batched two
    spatial = 3 if "3d" in str(node.target) else 2 if "2d" in str(node.target) else 1
    carried = len(dims) - spatial
    for dim in dims[carried:]:
        infer.solver.pin(dim, "it is a spatial dimension that is pooled or resized")
    rest = [Const(int(size), "a spatial dimension") for size in (shape or [])[carried:]]
    out = (*dims[:carried], *rest)
    return out if isinstance(value, Tensor) else [out for _ in value]


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d", zero=each)
def grid_sampler(infer: Inference, node: Node) -> Value:
    """Each channel read at the places that a grid names."""
    x, grid = node.args[:2]
    assert isinstance(x, Node)
    assert isinstance(grid, Node)
    batch, channel, *spatial = infer.dims(x)
    of_grid, *positions = infer.dims(grid)
    infer.solver.unify(batch, of_grid)
    for dim in (*spatial, *positions):
        infer.solver.pin(dim, "its positions are sampled on a grid")
    places = [Const(size, "a spatial dimension") for size in (shape_of(node) or [])[2:]]
    return (batch, channel, *places)


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
