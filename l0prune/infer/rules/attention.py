"""Attention: heads are carried, head dims contracted, positions normalised over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.expressions import COPIES, Const, Expr, prod
from l0prune.infer.nodes import argument
from l0prune.infer.registry import Value, of_operand, rule

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


# The output mixes rows of v, so it is zero exactly where v is.
@rule("aten.scaled_dot_product_attention", zero=of_operand(2))
def attention(infer: Inference, node: Node) -> Value:
    """``softmax(q·kᵀ)·v`` over dims (…, head, position, head dim)."""
    q, k, v = node.args[:3]
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    assert isinstance(v, Node)
    *batch, rows, inner = infer.dims(q)
    *batch_k, columns, inner_k = infer.dims(k)
    *batch_v, columns_v, outer = infer.dims(v)
    grouped = bool(argument(node, 7, "enable_gqa", False))
    for mine, theirs in ((batch, batch_k), (batch, batch_v)):
        _tie_batch(infer, mine, theirs, grouped)
    infer.solver.unify(inner, inner_k)
    infer.solver.unify(columns, columns_v)
    infer.solver.pin(columns, "a softmax over positions normalises it")
    infer.read(inner, node, None, q, k)
    infer.kind(inner, "head_dim")
    infer.kind(outer, "head_dim")
    if batch:
        infer.kind(batch[-1], "head")
    _tie_mask(infer, node, [*batch, rows, columns])
    infer.work(node, (*batch, rows, columns, infer.solver.resolve(inner)))
    infer.work(node, (*batch, rows, columns, outer))
    return (*batch, rows, outer)


def _tie_batch(infer: Inference, mine: list[Expr], theirs: list[Expr], grouped: bool) -> None:
    for position, (a, b) in enumerate(zip(reversed(mine), reversed(theirs), strict=False)):
        if position == 0 and grouped and a.size != b.size:
            infer.solver.unify(a, prod((b, Const(a.size // b.size, COPIES))))
        elif a.size == b.size:
            infer.solver.unify(a, b)


def _tie_mask(infer: Inference, node: Node, scores: list[Expr]) -> None:
    mask = argument(node, 3, "attn_mask")
    if isinstance(mask, Node):
        for score, dim in zip(reversed(scores), reversed(infer.dims(mask)), strict=False):
            if dim.size == score.size > 1:
                infer.solver.unify(score, dim)
