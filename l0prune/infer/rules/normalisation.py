"""Normalisation: the channel axis is carried, or read where statistics go over channels."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.nodes import (
    OF_ALL,
    argument,
    dims_of_statistics,
    norm_dim,
    operands,
    shape_of,
    takes_own_statistics,
    weight_behind,
)
from l0prune.infer.registry import Value, affine, each, of_operand, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.solver import Expr

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


@rule("aten.batch_norm", "aten.instance_norm", "aten.native_batch_norm", zero=affine(1))
def batch_norm(infer: Inference, node: Node) -> Value:
    """Statistics per channel: scale, shift, mean and variance carry the axis.

    Where they are statistics of the input, all positions of a channel count; but those of a
    weight can be taken before it is cut.
    """
    dims = infer.dims(source(node))
    if takes_own_statistics(node) and not infer.is_parameter(weight_behind(node)):
        by_example = "instance_norm" in str(node.target)
        for dim in dims[2:] if by_example else (dims[0], *dims[2:]):
            infer.solver.pin(dim, "{who} takes statistics over it")
    for operand in node.args[1:5]:
        if isinstance(operand, Node):
            infer.solver.unify(dims[1], infer.dims(operand)[0])
    return dims


@rule("aten.layer_norm", zero=affine(2))
def layer_norm(infer: Inference, node: Node) -> Value:
    """Statistics over the last dims read them without a weight: exact over the slots that stay.

    A slot that is zero adds nothing to the sum and ``mean²`` to the sum of squares, so the
    statistics over all slots follow from those that stay: ``infer/rewrites/statistics.py``
    computes them so.
    """
    return _read_without_weight(infer, node, "weight", "bias")


@rule("aten.rms_norm", zero=of_operand(0))
def rms_norm(infer: Inference, node: Node) -> Value:
    """A mean of squares over the last dims, in which zeros count only as a divisor."""
    return _read_without_weight(infer, node, "weight")


@rule("aten.native_layer_norm")
def native_layer_norm(infer: Inference, node: Node) -> Value:
    """Statistics over the last dims, which therefore stay whole."""
    for dim in _tied_to_affine(infer, node, "weight", "bias"):
        infer.solver.pin(dim, "{who} averages over it")
    return infer.dims(source(node))


def _read_without_weight(infer: Inference, node: Node, *affine_names: str) -> Value:
    for dim in _tied_to_affine(infer, node, *affine_names):
        infer.read(dim, node, None, source(node), why="{who} averages over it", stays=True)
    return infer.dims(source(node))


def _tied_to_affine(infer: Inference, node: Node, *names: str) -> tuple[Expr, ...]:
    """Tie the last dims, over which a norm goes, to those of scale and shift; return them."""
    over = infer.dims(source(node))[-len(node.args[1]) :]  # type: ignore[arg-type]
    for number, name in enumerate(names, start=2):
        operand = argument(node, number, name)
        if isinstance(operand, Node):
            for mine, theirs in zip(over, infer.dims(operand), strict=True):
                infer.solver.unify(mine, theirs)
    return over


@rule("aten.group_norm", zero=affine(2))
def group_norm(infer: Inference, node: Node) -> Value:
    """Statistics over each group of channels: only whole groups can be cut.

    One group is a LayerNorm over channels and positions: any of its channels can be cut.
    """
    dims = infer.dims(source(node))
    for operand in (argument(node, 2, "weight"), argument(node, 3, "bias")):
        if isinstance(operand, Node):
            infer.solver.unify(dims[1], infer.dims(operand)[0])
    if node.args[1] == 1:
        infer.read(dims[1], node, None, source(node), why="{who} averages over it", stays=True)
        return infer.dims(source(node))
    group, inner = infer.solver.factor(dims[1], int(node.args[1]))  # type: ignore[arg-type]
    infer.solver.pin(inner, "{who} averages over it")
    if inner.size > 1:
        infer.kind(group, "group")
    return infer.dims(source(node))


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten.logcumsumexp")
@rule("aten.cumsum", "aten.cumprod", zero=each)
def softmax(infer: Inference, node: Node) -> Value:
    """Normalised over one dim, which therefore stays whole."""
    dims = infer.dims(source(node))
    dim = dims[int(argument(node, 1, "dim", -1)) % len(dims)]
    infer.solver.pin(dim, "a softmax or running sum goes over it in {who}")
    return dims


def _where_norms_are_zero(node: Node, operands: Sequence[bool | None]) -> bool | float:
    """``g·v/‖v‖`` is zero where g is, and where v is, but not all of a slice: 0/0 is nan."""
    v, g = operands
    if v is True and g is not None:
        return nan
    return v is True or g is True


@rule("aten._weight_norm", zero=_where_norms_are_zero)
def weight_norm(infer: Inference, node: Node) -> Value:
    """``g·v/‖v‖`` with a norm for each slice along one dim, which is carried.

    The others are, too, where the norms can be taken before they are cut. One norm of all of v is
    that of the kept slots where v is zero at the others.
    """
    v, g = operands(node, 2)
    own = norm_dim(node)
    dims = infer.dims(v)
    if own == OF_ALL:
        for dim in dims:
            infer.read(dim, node, None, v, why="a weight norm is taken over it", stays=True)
        return dims
    infer.solver.unify(dims[own], infer.dims(g)[own])
    for number in () if infer.is_parameter(weight_behind(node)) else dims_of_statistics(node):
        infer.solver.pin(dims[number], "a weight norm is taken over it")
    return infer.dims(v)


@rule("aten.local_response_norm")
def local_response_norm(infer: Inference, node: Node) -> Value:
    """A norm over neighbouring channels, which therefore stay whole."""
    infer.solver.pin(infer.dims(source(node))[1], "neighbouring channels are mixed")
    return infer.dims(source(node))


@rule("aten.normalize", "aten.renorm")
def over_all(infer: Inference, node: Node) -> Value:
    """A tensor scaled by a norm over some of its dims, all of which stay whole."""
    infer.pin_all(source(node), "a norm is taken over it")
    return infer.opaque(node, f"a normalised tensor of {len(shape_of(node) or [])} dims")
