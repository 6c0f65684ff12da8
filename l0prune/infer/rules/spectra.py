"""Fourier transforms and complex numbers: transformed dims stay whole, the others are carried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from l0prune.infer.expressions import Const
from l0prune.infer.nodes import argument, operator_name, shape_of
from l0prune.infer.registry import Value, each, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.rules.pointwise import pointwise, zero_when_tried

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_PARTS = "it is pairs of real and imaginary parts"

# Of one number each, but without torch's tag for it.
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
    """Rolled by half of its size, which a cut would change."""
    dims = infer.dims(source(node))
    named: Any = argument(node, 1, "dim")
    over = range(len(dims)) if named is None else [named] if isinstance(named, int) else named
    for dim in over:
        infer.solver.pin(dims[dim], "its halves change places")
    return infer.dims(source(node))


@rule("aten.view_as_complex", zero=each)
def as_complex(infer: Inference, node: Node) -> Value:
    """The last dim, of two parts, becomes one number."""
    *dims, parts = infer.dims(source(node))
    infer.solver.pin(parts, _PARTS)
    return tuple(dims)


@rule("aten.view_as_real", zero=each)
def as_real(infer: Inference, node: Node) -> Value:
    """A new last dim of two parts."""
    return (*infer.dims(source(node)), Const(2, "real and imaginary parts"))
