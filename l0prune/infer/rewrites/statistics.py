"""Rewrites of sums, means, variances and norms after a cut of slots that all had one value.

Of ``n`` values ``k`` are kept, and each of the others was ``c``: zero, or a result of the forward
for zero, such as ``0 − mean``. Then the average of all is ``k/n · avg(x) + (1 − k/n) · c``; the
variance is the average of ``(x − mean)²``, in which ``c`` becomes ``(c − mean)²``.

LayerNorm is the case ``c = 0``: ``mean = Σx / n`` and ``var = (Σ(x − mean)² + (n − k)·mean²) / n``,
so with averages over the ``k``, ``var = k/n · avg((x − mean)²) + (1 − k/n)·mean²``.

The statistics of weights that a forward standardises are taken of the whole, before the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from l0prune.infer.build import Analysis
from l0prune.infer.nodes import (
    argument,
    arguments,
    dims_of_statistics,
    operator_name,
    shape_of,
    weight_behind,
)
from l0prune.infer.rewrites.literals import Sizes, group_norm, rewrites, shrinkage
from l0prune.infer.rules.movement import source
from l0prune.infer.rules.reduction import TELLING, reduced_dims

_ATEN = torch.ops.aten


@rewrites(*TELLING)
def over_all(sizes: Sizes, node: Node) -> None:
    """Compute the result over all slots from the kept ones, where any is removed."""
    x = source(node)
    dims = sizes.dims(x)
    reduced = reduced_dims(argument(node, 1, "dim"), len(dims))
    share = 1 / shrinkage(sizes, [dims[d] for d in reduced])
    if share == 1:
        return
    with node.graph.inserting_before(node):
        closed = _closed_value(sizes, node, x, [d for d in reduced if sizes.changes(dims[d])])
    name = operator_name(node.target)
    if name in ("aten.sum", "aten.mean"):
        gone = sum(dims[d].size - sizes.of(dims[d]) for d in reduced)
        _put_right(sizes, node, (1, gone) if name == "aten.sum" else (share, 1 - share), closed)
    else:
        _variance(sizes, node, reduced, share, closed)


def _put_right(sizes: Sizes, node: Node, weights: tuple[float, float], closed: Node | None) -> None:
    """Replace ``node(x)`` by ``weights · (node(x), node(closed))``."""
    users, result, graph = list(node.users), node, node.graph
    with graph.inserting_after(node):
        if weights[0] != 1:
            result = graph.call_function(_ATEN.mul.Tensor, (node, weights[0]))
    if closed is not None:
        with graph.inserting_after(result):
            other = graph.call_function(node.target, (closed, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
        with graph.inserting_after(other):
            scaled = graph.call_function(_ATEN.mul.Tensor, (other, weights[1]))
        with graph.inserting_after(scaled):
            result = graph.call_function(_ATEN.add.Tensor, (result, scaled))
    for user in users:
        user.replace_input_with(node, result)
    sizes.stands_for(result, node)


def _variance(
    sizes: Sizes, node: Node, reduced: list[int], share: float, closed: Node | None
) -> None:
    """Replace a variance or standard deviation, and its mean, if any, by basic operations."""
    graph, x = node.graph, source(node)
    count = math.prod(sizes.dims(x)[d].size for d in reduced)
    settings = _settings(node)

    def call(operator: Any, *args: Any) -> Node:
        return graph.call_function(operator, args)

    def average(of: Node, of_closed: Node | None) -> Node:
        left = call(_ATEN.mul.Tensor, call(_ATEN.mean.dim, of, reduced, True), share)
        if of_closed is None:
            return left
        gone = call(_ATEN.mean.dim, of_closed, reduced, True)
        return call(_ATEN.add.Tensor, left, call(_ATEN.mul.Tensor, gone, 1 - share))

    def distance(of: Node, mean: Node) -> Node:
        return call(_ATEN.square.default, call(_ATEN.sub.Tensor, of, mean))

    with graph.inserting_before(node):
        mean = average(x, closed)
        zero = call(_ATEN.zeros_like.default, mean) if closed is None else closed
        result = average(distance(x, mean), distance(zero, mean))
        if settings["correction"]:
            unbiased = count / max(count - settings["correction"], 0)
            result = call(_ATEN.mul.Tensor, result, unbiased)
        if "std" in operator_name(node.target):
            result = call(_ATEN.sqrt.default, result)
        results = [result, mean]
        if not settings["keepdim"]:
            results = [call(_ATEN.squeeze.dims, each, reduced) for each in results]
    by_user = {node: results[0]}
    if operator_name(node.target).endswith("_mean"):
        by_user = {user: results[user.args[1]] for user in node.users}  # type: ignore[index]
    for old, new in by_user.items():
        sizes.stands_for(new, old)
        old.replace_all_uses_with(new)
    for old in (*by_user, node):
        if old in graph.nodes:
            graph.erase_node(old)


def _settings(node: Node) -> dict[str, Any]:
    """The correction and keepdim of a variance, whichever of its overloads is called."""
    given = arguments(node)
    correction = given.get("correction", int(given.get("unbiased", True)))
    keepdim = given.get("keepdim", False)
    return {"correction": 1 if correction is None else correction, "keepdim": keepdim}


def _closed_value(sizes: Sizes, node: Node, x: Node, dims: list[int]) -> Node | None:
    """Return ``x`` at its closed slots, as one slot; None where it is zero there.

    The calls of the forward from zeros to ``x`` are repeated on a single zero slot.
    """
    zeros = sizes.closed[sizes.origin(node)]
    if not zeros:
        return None
    (dim,) = dims
    from_end = dim - len(sizes.dims(x))  # operands are aligned at their last dims
    made: dict[Node, Node] = {}
    pending = [x]
    while pending:
        top = pending[-1]
        slots = [each for each in top.all_input_nodes if _has_slots(sizes, each, from_end)]
        missing = [each for each in slots if each not in made]
        if sizes.origin(top) in zeros or top.op == "get_attr":
            at = len(sizes.dims(top)) + from_end
            one = node.graph.call_function(_ATEN.slice.Tensor, (top, at, 0, 1))
            made[top] = node.graph.call_function(_ATEN.zeros_like.default, (one,))
        elif missing:
            pending += missing
            continue
        else:
            args, kwargs = map_arg((top.args, top.kwargs), lambda each: made.get(each, each))
            made[top] = node.graph.call_function(top.target, args, kwargs)  # type: ignore[arg-type]
        pending.pop()
    return made[x]


def _has_slots(sizes: Sizes, node: Node, from_end: int) -> bool:
    dims = sizes.layouts.get(node.name, ())
    return len(dims) >= -from_end and dims[from_end].size > 1


_EPS = 1e-5


@rewrites("aten.layer_norm")
def layer_norm(sizes: Sizes, node: Node) -> None:
    """Keep the statistics over all slots, computed from the kept ones."""
    over: Any = node.args[1]
    rank = len(sizes.dims(node))
    if len(over) == 1:
        _padded(sizes, node)
        return
    _written_out(sizes, node, list(range(rank - len(over), rank)), by_channel=False)


@rewrites("aten.group_norm")
def one_group(sizes: Sizes, node: Node) -> None:
    """Rewrite one group as a LayerNorm over channels and positions, else the number of groups."""
    if node.args[1] == 1:
        over = list(range(1, len(sizes.dims(node))))
        _written_out(sizes, node, over, by_channel=True)
    else:
        group_norm(sizes, node)


def _padded(sizes: Sizes, node: Node) -> None:
    """Compute the norm over the last dim with the kept slots padded by zeros to the old size.

    This takes a fraction of the time of averages and arithmetic, as the operator is one pass.
    """
    over: Any = node.args[1]
    before: int = over[0]
    left = sizes.of(sizes.dims(node)[-1])
    if left == before:
        return
    graph = node.graph
    affine = [argument(node, 2, "weight"), argument(node, 3, "bias")]
    with graph.inserting_before(node):
        x, weight, bias = (
            graph.call_function(_ATEN.pad.default, (each, [0, before - left]))
            if isinstance(each, Node)
            else each
            for each in (node.args[0], *affine)
        )
        norm = (x, [before], weight, bias, argument(node, 4, "eps", _EPS))
        whole = graph.call_function(_ATEN.layer_norm.default, norm)
        part = graph.call_function(_ATEN.slice.Tensor, (whole, -1, 0, left))
        result = graph.call_function(_ATEN.contiguous.default, (part,))
    _replace(sizes, node, result)


def _written_out(sizes: Sizes, node: Node, over: list[int], *, by_channel: bool) -> None:
    """Replace the norm over these dims by basic operations, where any of them is cut."""
    dims = sizes.dims(node)
    share = 1 / shrinkage(sizes, [dims[dim] for dim in over])
    if share == 1:
        return
    graph, x = node.graph, node.args[0]
    dtype = node.meta["val"].dtype
    is_half = dtype in (torch.bfloat16, torch.float16)
    affine = [argument(node, 2, "weight"), argument(node, 3, "bias")]
    eps = argument(node, 4, "eps", _EPS)

    def call(operator: Any, *args: Any) -> Node:
        return graph.call_function(operator, args)

    def average(of: Any) -> Node:
        return call(_ATEN.mul.Tensor, call(_ATEN.mean.dim, of, over, True), share)

    def spread(operand: Node) -> Node:
        for _ in range(len(over) - 1 if by_channel else 0):
            operand = call(_ATEN.unsqueeze.default, operand, -1)
        return operand

    with graph.inserting_before(node):
        if is_half:  # the operator itself computes in float32, too
            x = call(_ATEN.to.dtype, x, torch.float32)
        mean = average(x)
        centred = call(_ATEN.sub.Tensor, x, mean)
        squares = average(call(_ATEN.square.default, centred))
        gone = call(_ATEN.mul.Tensor, call(_ATEN.square.default, mean), 1 - share)
        variance = call(_ATEN.add.Tensor, squares, gone)
        scale = call(_ATEN.rsqrt.default, call(_ATEN.add.Tensor, variance, eps))
        weight, bias = (spread(each) if isinstance(each, Node) else each for each in affine)
        if weight is not None:  # with one scale for each example these are few numbers
            scale = call(_ATEN.mul.Tensor, scale, weight)
        result = call(_ATEN.mul.Tensor, centred, scale)
        if bias is not None:
            result = call(_ATEN.add.Tensor, result, bias)
        if is_half:
            result = call(_ATEN.to.dtype, result, dtype)
    _replace(sizes, node, result)


def standardised_weights(analysis: Analysis, kept: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, by name of a standardised weight that loses columns, a function to standardise it."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    sizes = Sizes(analysis.plan, kept, analysis.layouts)
    for node in analysis.captured.graph.nodes:
        stored = weight_behind(node)
        if stored is not None and _is_cut(sizes, node):
            found[analysis.captured.names[stored.name]] = partial(_standardised_as_stored, node)
    return found


def _standardised_as_stored(node: Node, whole: Tensor) -> Tensor:
    """Return the standardised weight in its stored shape; the node's may differ."""
    return _standardised(node, whole.reshape(shape_of(node) or [])).reshape(whole.shape)


def _standardised(node: Node, whole: Tensor) -> Tensor:
    if operator_name(node.target) == "aten._weight_norm":
        over = dims_of_statistics(node)
        norms: Tensor = torch.linalg.vector_norm(whole, dim=over, keepdim=True)
        return whole / norms
    eps = float(argument(node, 7, "eps"))
    return torch.nn.functional.batch_norm(whole, None, None, training=True, eps=eps)


@rewrites("aten.batch_norm", "aten._weight_norm")
def norm_of_weight(sizes: Sizes, node: Node) -> None:
    """Replace the norm of a weight that is stored standardised by its scale and shift."""
    if weight_behind(node) is None or not _is_cut(sizes, node):
        return
    result, graph = node.args[0], node.graph
    by_row = operator_name(node.target) == "aten.batch_norm"
    scale_and_shift = zip((_ATEN.mul.Tensor, _ATEN.add.Tensor), node.args[1:3], strict=False)
    for operator, operand in scale_and_shift:
        if isinstance(operand, Node):
            with graph.inserting_before(node):
                if by_row:
                    operand = graph.call_function(_ATEN.unsqueeze.default, (operand, -1))
                result = graph.call_function(operator, (result, operand))
    assert isinstance(result, Node)
    _replace(sizes, node, result)


def _replace(sizes: Sizes, node: Node, result: Node) -> None:
    sizes.stands_for(result, node)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _is_cut(sizes: Sizes, node: Node) -> bool:
    return any(sizes.changes(sizes.dims(node)[dim]) for dim in dims_of_statistics(node))
