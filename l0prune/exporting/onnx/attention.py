"""Attention as products of matrices, in fewer nodes than torch's ONNX exporter makes of it.

The exporter turns the keys by way of three dims, whose sizes it reads off at run time: ten nodes
and one more pass over the keys for every attention, and it takes four dims only. Written out, the
keys are turned as they are, and ONNX Runtime merges that with what lies before and after.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from l0prune.infer.nodes import argument

_ATEN = torch.ops.aten


def written_as_products(program: ExportedProgram) -> ExportedProgram:
    """The program, or a copy around its tensors in which attention is written out.

    What is causal, or has fewer heads of keys than of queries, stays for the exporter.
    """
    if not any(_can_be_written(node) for node in program.graph.nodes):
        return program
    copied = around_its_tensors(program)
    for node in list(copied.graph.nodes):
        if _can_be_written(node):
            _write(copied.graph, node)
    views_that_may_copy(copied)  # products lie otherwise in memory than what attention returns
    copied.graph_module.recompile()
    return copied


def around_its_tensors(program: ExportedProgram) -> ExportedProgram:
    """A copy of the program that shares its parameters, buffers and constants."""
    held = [*program.state_dict.values(), *program.constants.values()]
    return copy.deepcopy(program, {id(each): each for each in held})


def views_that_may_copy(program: ExportedProgram) -> None:
    """Let a view be a reshape, in place: in ONNX there is no difference."""
    for node in program.graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default


def _can_be_written(node: Node) -> bool:
    if node.target is not _ATEN.scaled_dot_product_attention.default:
        return False
    return not (argument(node, 5, "is_causal", False) or argument(node, 7, "enable_gqa", False))


def _write(graph: Graph, node: Node) -> None:
    """``softmax(scale·q·kᵀ + mask)·v`` over any number of leading dims."""
    q, k, v = node.args[:3]
    mask, scale = argument(node, 3, "attn_mask"), argument(node, 6, "scale")
    assert isinstance(q, Node)
    scale = 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale

    def call(operator: Any, *args: Any) -> Node:
        return graph.call_function(operator, args)

    with graph.inserting_before(node):
        turned = call(_ATEN.transpose.int, k, -2, -1)
        scores = call(_ATEN.matmul.default, call(_ATEN.mul.Tensor, q, scale), turned)
        is_boolean = isinstance(mask, Node) and _value(mask).dtype == torch.bool
        if is_boolean:  # made once for all layers that are given this mask
            mask = call(_ATEN.where.Scalar, mask, 0.0, -math.inf)
        if isinstance(mask, Node):
            scores = call(_ATEN.add.Tensor, scores, mask)
        weights = call(_ATEN.softmax.int, scores, -1)
        if is_boolean:  # torch attends to nothing where everything is hidden
            nothing = call(_ATEN.isnan.default, weights)
            weights = call(_ATEN.masked_fill.Scalar, weights, nothing, 0.0)
        result = call(_ATEN.matmul.default, weights, v)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _value(node: Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
