"""Reductions: the reduced dims are read without weights, the others are carried."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node

from l0prune.infer.nodes import argument, hint, operator_name, shape_of
from l0prune.infer.registry import Value, each, rule
from l0prune.infer.rules.contraction import name_heads
from l0prune.infer.rules.movement import source
from l0prune.infer.solver import Expr, variables
from l0prune.plan.layout import Const

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l0prune.infer.inference import Inference


# An export compensates for removed slots that all had one value (infer/rewrites/statistics.py).
TELLING = tuple(f"aten.{name}" for name in ("sum", "mean", "var", "std", "var_mean", "std_mean"))


def reduced_dims(dims: Any, rank: int) -> list[int]:
    """Return the dims that an operator's argument names; all where it names none."""
    if dims is None or dims == [] or isinstance(dims, bool):
        return list(range(rank))
    return [int(d) % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]


def keep(infer: Inference, node: Node, reduced: list[int]) -> tuple[Expr, ...]:
    """Return the operand's dims without the reduced ones, or with size 1 for each of them."""
    dims = infer.dims(source(node))
    value = node.meta["val"]
    first = value if isinstance(value, Tensor) else value[0]
    if len(first.shape) == len(dims):
        return tuple(Const(1) if p in reduced else dim for p, dim in enumerate(dims))
    return tuple(dim for p, dim in enumerate(dims) if p not in reduced)


@rule("aten.sum", zero=each)
def total(infer: Inference, node: Node) -> Value:
    """A sum reads a dim without weights: exact where the slot's values are zero."""
    _name_heads(infer, node)
    return _without_weight(infer, node, argument(node, 1, "dim"))


def _name_heads(infer: Inference, node: Node) -> None:
    """Record heads and head dims where products over the last dim are summed, one sum for a head.

    It is the product of a matrix of heads with one of as many, written out, as scores over the
    edges of a graph are: ``(x * weight).sum(-1)``.
    """
    given, dims = source(node), infer.dims(source(node))
    factors = [shape_of(each) or [] for each in given.all_input_nodes]
    is_product = operator_name(given.target) == "aten.mul" and len(factors) > 1
    is_last = reduced_dims(argument(node, 1, "dim"), len(dims)) == [len(dims) - 1]
    is_alike = all(len(sizes) > 1 and sizes[-2:] == factors[0][-2:] for sizes in factors)
    has_axes = all(any(True for _ in variables(dim)) for dim in dims[-2:])
    if is_product and is_last and is_alike and has_axes:
        name_heads(infer, [dims[-2]], [dims[-1]])


@rule("aten.mean", zero=each)
def mean(infer: Inference, node: Node) -> Value:
    """A sum divided by a constant: the export keeps the divisor from before the cut."""
    return _without_weight(infer, node, argument(node, 1, "dim"), "a mean is taken over it")


@rule("aten.linalg_vector_norm", "aten.norm", "aten.linalg_norm", zero=each)
def norm(infer: Inference, node: Node) -> Value:
    """A norm, which reads its dims without weights where zeros do not change it, else pins them."""
    dim = argument(node, 2, "dim")
    if _ignores_zeros(node, dim):
        return _without_weight(infer, node, dim, "a norm is taken over it")
    return _over(infer, node, dim)


def _ignores_zeros(node: Node, dim: Any) -> bool:
    order = argument(node, 1, "ord", argument(node, 1, "p"))
    if order is None:
        return True  # the root of the sum of squares
    of_vectors = isinstance(dim, int) or (isinstance(dim, list | tuple) and len(dim) == 1)
    is_vector_norm = of_vectors or operator_name(node.target) != "aten.linalg_norm"
    return is_vector_norm and isinstance(order, int | float) and order >= 0


def _without_weight(infer: Inference, node: Node, dim: Any, why: str = "") -> Value:
    dims = infer.dims(source(node))
    reduced = reduced_dims(dim, len(dims))
    for position in reduced:
        infer.read(dims[position], node, None, source(node), why=why)
    kept = [p for p, dim in enumerate(dims) if p not in reduced and any(variables(dim))]
    if len(kept) == 1:  # which may turn out to have the slots of a reduced one, as in W·Wᵀ
        infer.carried[node, source(node)] = kept[0]
    return keep(infer, node, reduced)


@rule("aten.amax", "aten.amin", "aten.prod", zero=each)
@rule("aten.logsumexp")
def extreme(infer: Inference, node: Node) -> Value:
    """A reduction that zeros can change: its dims stay whole."""
    return _over(infer, node, argument(node, 1, "dim"))


def _over(infer: Inference, node: Node, dim: Any) -> Value:
    dims = infer.dims(source(node))
    reduced = reduced_dims(dim, len(dims))
    for position in reduced:
        infer.solver.pin(dims[position], f"{operator_name(node.target)} reduces over it")
    return keep(infer, node, reduced)


def _rootlike(node: Node, operands: Sequence[bool | None]) -> float | bool:
    """Nan where the operand is zero: the output is zero there, but its gradient is 0/0."""
    return nan if each(node, operands) else False


@rule("aten.var", "aten.var_mean", zero=each)
@rule("aten.std", "aten.std_mean", zero=_rootlike)
def variance(infer: Inference, node: Node) -> Value:
    """Variance or standard deviation: each zero adds the squared mean to the sum of squares."""
    dims = infer.dims(source(node))
    reduced = reduced_dims(argument(node, 1, "dim"), len(dims))
    why = f"{operator_name(node.target)} goes over it"
    for position in reduced if 0 in reduced and len(dims) > 1 else ():
        infer.solver.pin(dims[position], f"{why} and over the batch")  # whose size is not known
    kept = _without_weight(infer, node, argument(node, 1, "dim"), why)
    assert isinstance(kept, tuple)
    value = node.meta["val"]
    return kept if isinstance(value, Tensor) else [kept for _ in value]


@rule("aten.max", "aten.min", zero=each)
@rule("aten.argmax")
def statistic(infer: Inference, node: Node) -> Value:
    """A statistic over some dims: those stay whole."""
    tensors = [arg for arg in node.args if isinstance(arg, Node) and shape_of(arg) is not None]
    if len(tensors) > 1:  # max(a, b): elementwise
        for tensor in tensors:
            infer.pin_all(tensor, f"{operator_name(node.target)} compares it")
        return infer.opaque(node, "a comparison")
    dims = infer.dims(source(node))
    reduced = reduced_dims(argument(node, 1, "dim"), len(dims))
    for position in reduced:
        infer.solver.pin(dims[position], f"{operator_name(node.target)} goes over it")
    kept = keep(infer, node, reduced)
    value = node.meta["val"]
    return kept if isinstance(value, Tensor) else [kept for _ in value]


# Position of the dim argument of operators that compare the slots of one dim.
_ORDERED = {"sort": 1, "argsort": 1, "msort": 9, "topk": 2, "kthvalue": 2, "median": 1}
_ORDERED |= {"nanmedian": 1, "mode": 1, "cummax": 1, "cummin": 1}


@rule(*(f"aten.{name}" for name in _ORDERED))
def ordered(infer: Inference, node: Node) -> Value:
    """The slots of one dim ordered by value: that dim stays whole, the others are carried."""
    name, dims = operator_name(node.target), infer.dims(source(node))
    last = -1 if name.split(".")[-1] in ("sort", "argsort", "topk", "kthvalue", "mode") else None
    dim = argument(node, _ORDERED[name.removeprefix("aten.")], "dim", last)
    dim = next((a for a in [dim] if isinstance(a, int) and not isinstance(a, bool)), last)
    over = reduced_dims(dim, len(dims))
    for position in over:
        infer.solver.pin(dims[position], f"{name} compares its slots with one another")
    why = f"a result of {name}"
    value = node.meta["val"]
    shape = (value if isinstance(value, Tensor) else value[0]).shape
    stays = over if len(shape) == len(dims) else []
    sizes = {position: Const(hint(shape[position]), why) for position in stays}
    kept = tuple(sizes.get(p, dim) for p, dim in enumerate(dims) if p in sizes or p not in over)
    return kept if isinstance(value, Tensor) else [kept for _ in value]
