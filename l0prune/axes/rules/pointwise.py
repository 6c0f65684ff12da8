"""Elementwise operators: every operand's dims are tied under broadcasting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.axes.nodes import operands_of, shape_of
from l0prune.axes.registry import Value, each, every, first, rule, some
from l0prune.axes.solver import Const, Expr

if TYPE_CHECKING:
    from l0prune.axes.inference import Inference


def pointwise(infer: Inference, node: Node) -> Value:
    """Tie the operands dim by dim, aligned at the last; a broadcast dim ties nothing."""
    shape = shape_of(node) or []
    out: list[Expr | None] = [None] * len(shape)
    for operand in operands_of(node):
        if not isinstance(infer.values.get(operand), tuple):
            continue
        dims = infer.dims(operand)
        for position, dim in enumerate(dims, start=len(shape) - len(dims)):
            if dim.size != shape[position] or dim.size == 1:
                continue
            known = out[position]
            if known is None:
                out[position] = dim
            else:
                infer.solver.unify(known, dim)
    return tuple(dim if dim is not None else Const(1) for dim in out)


# Elementwise operators that torch tags are found by their tag; those below are named to say how
# they treat zeros, or because they carry no tag (composite ones, and dropout in eval mode).
_SAME_AT_ZERO = (
    "relu relu6 leaky_relu prelu elu selu celu gelu silu mish tanh hardtanh hardswish softshrink "
    "hardshrink tanhshrink softsign neg abs sign sin sinh asin asinh tan atan atanh erf sqrt "
    "square expm1 log1p floor ceil round trunc frac positive dropout alpha_dropout feature_dropout "
    "feature_alpha_dropout relu_ relu6_ leaky_relu_ elu_ silu_ gelu_ mish_ hardtanh_ hardswish_ "
    "dropout_ tanh_ nan_to_num rrelu threshold_"
)
rule(*(f"aten.{name}" for name in _SAME_AT_ZERO.split()), zero=each)(pointwise)
rule("aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.maximum", zero=every)(pointwise)
rule("aten.minimum", "aten.where", "aten.lerp", zero=every)(pointwise)
rule("aten.mul", "aten.mul_", "aten.multiply", "aten.logical_and", zero=some)(pointwise)
rule("aten.div", "aten.div_", "aten.masked_fill", zero=first)(pointwise)
