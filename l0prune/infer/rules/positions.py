"""Operators over positions: pooling, resizing, sliding windows, Fourier transforms.

The dims that they go over stay whole; channels are carried through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node

from l0prune.infer.nodes import argument, operands, operator_name, shape_of
from l0prune.infer.registry import Value, each, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.rules.pointwise import pointwise, zero_when_tried
from l0prune.infer.solver import prod
from l0prune.plan.layout import Const

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
    """Windows over the spatial dims of each channel."""
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
    """Each channel sampled at the positions of a grid."""
    x, grid = operands(node, 2)
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
    """Windows over one dim, which becomes their number; their length is a new last dim."""
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
    """``(…, c × places in a window, windows)`` to ``(…, c, h, w)``, with overlaps summed."""
    *batch, columns, windows = infer.dims(source(node))
    channels, height, width = (shape_of(node) or [])[-3:]
    channel, inside = infer.solver.factor(columns, channels)
    for dim in (inside, windows):
        infer.solver.pin(dim, "it is put together from sliding windows")
    spatial = (Const(size, "a spatial dimension") for size in (height, width))
    return (*batch, channel, *spatial)


_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_PARTS = "it is pairs of real and imaginary parts"

# Elementwise, but without torch's tag.
rule("aten.complex", "aten.polar", zero=zero_when_tried)(pointwise)
rule("aten.real", "aten.imag", "aten._conj", "aten.conj", zero=each)(pointwise)


@rule(*(f"aten.fft_{kind}{over}" for kind in _KINDS for over in ("", "2", "n")), zero=each)
def fourier(infer: Inference, node: Node) -> Value:
    """Each result depends on all positions of the transformed dims, and on no other slot."""
    dims, shape = list(infer.dims(source(node))), shape_of(node) or []
    for dim in _transformed(node, len(dims)):
        infer.solver.pin(dims[dim], "a Fourier transform goes over it")
        dims[dim] = Const(shape[dim], "a Fourier transform's frequencies or positions")
    return tuple(dims)


def _transformed(node: Node, rank: int) -> list[int]:
    name = operator_name(node.target)
    one_dim = not name.endswith(("2", "n"))
    named: Any = argument(node, 2, "dim", -1 if one_dim else (-2, -1) if name[-1] == "2" else None)
    if one_dim:
        return [named]
    if named is not None:
        return list(named)
    sizes: Any = argument(node, 1, "s")
    return list(range(rank)) if sizes is None else list(range(-len(sizes), 0))


@rule("aten.fft_fftshift", "aten.fft_ifftshift", zero=each)
def shift(infer: Inference, node: Node) -> Value:
    """A roll by half of the size, which a cut would change."""
    dims = infer.dims(source(node))
    named: Any = argument(node, 1, "dim")
    over = range(len(dims)) if named is None else [named] if isinstance(named, int) else named
    for dim in over:
        infer.solver.pin(dims[dim], "its halves change places")
    return infer.dims(source(node))


@rule("aten.view_as_complex", zero=each)
def as_complex(infer: Inference, node: Node) -> Value:
    """Complex numbers from a last dim of real and imaginary parts."""
    *dims, parts = infer.dims(source(node))
    infer.solver.pin(parts, _PARTS)
    return tuple(dims)


@rule("aten.view_as_real", zero=each)
def as_real(infer: Inference, node: Node) -> Value:
    """A new last dim of two parts."""
    return (*infer.dims(source(node)), Const(2, "real and imaginary parts"))
