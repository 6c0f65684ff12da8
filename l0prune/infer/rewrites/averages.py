"""Sums, means and variances after slots are gone that all had one value.

Of ``n`` values ``k`` are left, and each of the others was ``c``: zero, or what the forward makes
of zero, such as ``0 − mean``. Then the average of all is ``k/n · avg(x) + (1 − k/n) · c``; the
variance is the average of ``(x − mean)²``, in which ``c`` becomes ``(c − mean)²``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from l0prune.infer.nodes import argument, arguments, operator_name
from l0prune.infer.rewrites.literals import rewrites, shrinkage
from l0prune.infer.rewrites.sizes import Sizes
from l0prune.infer.rules.reduction import TELLING, reduced_dims
from l0prune.plan.layout import size_of

_ATEN = torch.ops.aten


@rewrites(*TELLING)
def over_all(sizes: Sizes, node: Node) -> None:
    """The result over all slots from those that stayed, where any is gone."""
    x = node.args[0]
    assert isinstance(x, Node)
    dims = sizes.dims(x)
    reduced = reduced_dims(argument(node, 1, "dim"), len(dims))
    share = 1 / shrinkage(sizes, [dims[d] for d in reduced])
    if share == 1:
        return
    with node.graph.inserting_before(node):
        closed = _closed_value(sizes, node, x, [d for d in reduced if sizes.changes(dims[d])])
    name = operator_name(node.target)
    if name in ("aten.sum", "aten.mean"):
        gone = sum(size_of(dims[d]) - sizes.of(dims[d]) for d in reduced)
        _put_right(sizes, node, (1, gone) if name == "aten.sum" else (share, 1 - share), closed)
    else:
        _variance(sizes, node, reduced, share, closed)


def _put_right(sizes: Sizes, node: Node, weights: tuple[float, float], closed: Node | None) -> None:
    """``weights · (node(x), node(closed))`` in place of ``node(x)``."""
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
    """Variance or standard deviation, with the mean where it is asked for, as plain operations."""
    graph, x = node.graph, node.args[0]
    assert isinstance(x, Node)
    count = math.prod(size_of(sizes.dims(x)[d]) for d in reduced)
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
    """What ``x`` was at its closed slots, in one slot; None where that is zero.

    What the forward does to ``x`` on the way from zeros is done once more, to a single zero.
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
    return len(dims) >= -from_end and size_of(dims[from_end]) > 1
