"""LayerNorm after some of its slots are gone, all of them zero before.

With ``n`` values before and ``k`` after, ``mean = Σx / n`` and
``var = (Σ(x − mean)² + (n − k)·mean²) / n``: what each value that went had to say. So with averages
over the ``k``, ``mean = k/n · avg(x)`` and ``var = k/n · avg((x − mean)²) + (1 − k/n)·mean²``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from l0prune.infer.nodes import argument
from l0prune.infer.rewrites.literals import group_norm, rewrites, shrinkage
from l0prune.infer.rewrites.sizes import Sizes

_ATEN = torch.ops.aten
_EPS = 1e-5


@rewrites("aten.layer_norm")
def layer_norm(sizes: Sizes, node: Node) -> None:
    """The same statistics from the slots that stayed."""
    over: Any = node.args[1]
    rank = len(sizes.dims(node))
    if len(over) == 1:
        _padded(sizes, node)
        return
    _written_out(sizes, node, list(range(rank - len(over), rank)), by_channel=False)


@rewrites("aten.group_norm")
def one_group(sizes: Sizes, node: Node) -> None:
    """One group is a LayerNorm over channels and positions; of several, some are gone."""
    if node.args[1] == 1:
        over = list(range(1, len(sizes.dims(node))))
        _written_out(sizes, node, over, by_channel=True)
    else:
        group_norm(sizes, node)


def _padded(sizes: Sizes, node: Node) -> None:
    """The norm over the last dim, with zeros again in the places of what is gone behind the rest.

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
    sizes.stands_for(result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _written_out(sizes: Sizes, node: Node, over: list[int], *, by_channel: bool) -> None:
    """The norm over these dims as plain operations, where any of them is cut."""
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
    sizes.stands_for(result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
