"""Data movement: reshapes, permutations, broadcasts; and tensors that a forward creates.

Values move, slots keep their identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.capture.compat import size_hint
from l0prune.infer.nodes import (
    IDENTITIES,
    PERMUTATIONS,
    RESHAPES,
    argument,
    dim_order,
    dtype_of,
    shape_of,
)
from l0prune.infer.registry import Value, each, of_operand, rule
from l0prune.infer.solver import COPIES, Expr, Var, prod
from l0prune.plan.layout import Const

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l0prune.infer.inference import Inference


def source(node: Node) -> Node:
    """Return the first operand, the tensor that is moved."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand


@rule(*IDENTITIES, zero=each)
def identity(infer: Inference, node: Node) -> Value:
    """A tensor on another device, of another dtype or memory format, or one of its shape."""
    return infer.dims(source(node))


@rule(*RESHAPES, zero=each)
def reshape(infer: Inference, node: Node) -> Value:
    """Row-major regrouping of the dims."""
    return tuple(infer.solver.regroup(list(infer.dims(source(node))), shape_of(node) or []))


@rule("aten.squeeze", "aten.unsqueeze", "aten.squeeze_", "aten.unsqueeze_", zero=each)
def squeeze(infer: Inference, node: Node) -> Value:
    """Dims of size one are added or removed; the order of the others stays."""
    dims = [dim for dim in infer.dims(source(node)) if dim.size != 1]
    return tuple(dims.pop(0) if size != 1 else Const(1) for size in shape_of(node) or [])


@rule(*PERMUTATIONS, zero=each)
def permute(infer: Inference, node: Node) -> Value:
    """Dims in another order."""
    dims = infer.dims(source(node))
    return tuple(dims[d] for d in dim_order(node, len(dims)))


@rule("aten.diagonal", zero=each)
def diagonal(infer: Inference, node: Node) -> Value:
    """Move the diagonal of two dims, where both are the same slot, to a new last dim."""
    dims = list(infer.dims(source(node)))
    first, second = (int(argument(node, at, f"dim{at - 1}", at - 2)) % len(dims) for at in (2, 3))
    one, other = dims[first], dims[second]
    rest = [dim for place, dim in enumerate(dims) if place not in (first, second)]
    if argument(node, 1, "offset", 0) == 0 and one.size == other.size:
        infer.solver.unify(one, other)
        return (*rest, infer.solver.resolve(one))
    for dim in (one, other):
        infer.solver.pin(dim, "a diagonal beside the main one is taken, or one of unequal dims")
    return (*rest, Const((shape_of(node) or [0])[-1], "a diagonal"))


@rule("aten.expand_as", zero=of_operand(0))
def expand_as(infer: Inference, node: Node) -> Value:
    """Expansion to the shape of another tensor: expanded dims are cut with that tensor's."""
    dims, other = infer.dims(source(node)), infer.dims(node.args[1])  # type: ignore[arg-type]
    new = len(other) - len(dims)
    return (
        *other[:new],
        *(d if d.size == o.size else o for d, o in zip(dims, other[new:], strict=True)),
    )


@rule("aten.expand", "aten.broadcast_to", zero=of_operand(0))
def expand(infer: Inference, node: Node) -> Value:
    """Expansion to given sizes: new or expanded dims are copies, the others stay."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    padded = (*(Const(1) for _ in range(len(shape) - len(dims))), *dims)
    pairs = zip(padded, shape, strict=True)
    return tuple(d if d.size == size else _copies(infer, node, size) for d, size in pairs)


def _copies(infer: Inference, node: Node, count: int) -> Expr:
    """Return a dim of copies: as many as are kept of the axis that it meets.

    Copies of a result that meet no axis keep their number, as those of the keys in grouped
    attention. Those of a stored filter, an index or a mask are read by nobody then.
    """
    dtype, dim = dtype_of(node), Var(count, copies=True)
    is_counted = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    if not is_counted and not infer.is_weight(node):
        infer.copies_of_results.append(dim)
    return dim


@rule("aten.repeat", "aten.tile", zero=of_operand(0))
def repeat(infer: Inference, node: Node) -> Value:
    """``n`` copies of a dim, one after another: copies × slots."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    padded = (*(Const(1) for _ in range(len(shape) - len(dims))), *dims)
    out: list[Expr] = []
    for dim, size in zip(padded, shape, strict=True):
        if dim.size == size or not dim.size:
            out.append(dim)
        elif dim.size == 1:
            out.append(_copies(infer, node, size))
        else:
            out.append(prod((Const(size // dim.size, COPIES), dim)))
    return tuple(out)


@rule("aten.repeat_interleave", zero=of_operand(0))
def repeat_interleave(infer: Inference, node: Node) -> Value:
    """Each slot ``n`` times in a row: slots × copies."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    dim, copies = argument(node, 2, "dim"), argument(node, 1, "repeats")
    if isinstance(copies, Node) and shape_of(copies) is None:  # as many as the batch has examples
        copies = size_hint(copies.meta.get("val"))
    if not isinstance(dim, int) or not isinstance(copies, int):
        infer.pin_all(source(node), "repeat_interleave with a count per slot")
        return tuple(Const(size) for size in shape)
    dim %= len(dims)
    many = prod((dims[dim], _copies(infer, node, copies))) if copies > 1 else dims[dim]
    return (*dims[:dim], many, *dims[dim + 1 :])


@rule("aten.pixel_shuffle", zero=each)
def pixel_shuffle(infer: Inference, node: Node) -> Value:
    """``(c × r × r, h, w)`` to ``(c, h × r, w × r)``."""
    *batch, channel, _, _ = infer.dims(source(node))
    scale = int(node.args[1]) ** 2  # type: ignore[arg-type]
    outer, inner = infer.solver.factor(channel, channel.size // scale)
    infer.solver.pin(inner, "PixelShuffle turns it into spatial positions")
    height, width = (Const(s, "a spatial dimension") for s in (shape_of(node) or [])[-2:])
    return (*batch, outer, height, width)


@rule("aten.pixel_unshuffle", zero=each)
def pixel_unshuffle(infer: Inference, node: Node) -> Value:
    """``(c, h × r, w × r)`` to ``(c × r × r, h, w)``."""
    *batch, channel, _, _ = infer.dims(source(node))
    scale = int(node.args[1]) ** 2  # type: ignore[arg-type]
    height, width = (Const(s, "a spatial dimension") for s in (shape_of(node) or [])[-2:])
    return (*batch, prod((channel, Const(scale, "spatial positions"))), height, width)


@rule("aten.channel_shuffle", zero=each)
def channel_shuffle(infer: Inference, node: Node) -> Value:
    """``g × c`` to ``c × g``."""
    batch, channel, *spatial = infer.dims(source(node))
    group, inner = infer.solver.factor(channel, int(node.args[1]))  # type: ignore[arg-type]
    return (batch, prod((inner, group)), *spatial)


@rule("aten.meshgrid", "aten.broadcast_tensors")
def many(infer: Inference, node: Node) -> Value:
    """Several tensors broadcast against one another: nothing in them is cut."""
    for operand in node.all_input_nodes:
        infer.pin_all(operand, f"{node.target} stretches it")
    return infer.opaque(node, "a stretched tensor")


def _always(node: Node, operands: Sequence[bool | None]) -> bool:
    return True


# Tensors of equal entries can be created at the size of any dim that they meet.
_ALIKE = "ones new_ones full new_full empty new_empty"
_ZEROS = "zeros new_zeros"
# Each slot has one entry, known beforehand: an export picks the entries of the kept slots.
PATTERNS = tuple(f"aten.{name}" for name in ("arange", "linspace", "logspace", "eye"))
_MADE = "tril_indices triu_indices rand randn scalar_tensor tensor"


def alike(infer: Inference, node: Node) -> Value:
    """A tensor of equal entries: each dim is a new variable, free to match any dim."""
    return tuple(infer.solver.fresh(size) for size in shape_of(node) or [])


rule(*(f"aten.{name}" for name in _ALIKE.split()))(alike)
rule(*(f"aten.{name}" for name in _ZEROS.split()), zero=_always)(alike)


@rule(*PATTERNS)
def pattern(infer: Inference, node: Node) -> Value:
    """A tensor of known entries: each dim is a new variable, unless an input gives its size."""
    return made(infer, node) if node.all_input_nodes else alike(infer, node)


@rule(*(f"aten.{name}" for name in _MADE.split()))
def made(infer: Inference, node: Node) -> Value:
    """A tensor of other entries: dims that meet it keep their size."""
    return infer.opaque(node, "a tensor made inside forward")


rule(*(f"aten.{n}_like" for n in ("ones", "full", "empty", "rand", "randn")))(identity)
rule("aten.zeros_like", "aten.zero_", "aten.zero", zero=_always)(identity)


@rule("aten.one_hot")
def one_hot(infer: Inference, node: Node) -> Value:
    """A one-hot code for each index, along a new last dim."""
    return (*infer.dims(source(node)), Const((shape_of(node) or [0])[-1], "a one-hot code"))


@rule("wrap_with_autocast")
def under_autocast(infer: Inference, node: Node) -> Value:
    """A region under autocast that does more than cast its operands, which therefore stay whole."""
    why = "it runs under torch.autocast, where an operator does more than cast what it is given"
    for operand in node.all_input_nodes:
        infer.pin_all(operand, why)
    return infer.opaque(node, "a result of operators under torch.autocast")
