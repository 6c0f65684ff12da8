"""The same program in terms that torch's ONNX exporter can translate."""

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


def in_plain_terms(program: ExportedProgram) -> ExportedProgram:
    """A copy whose views may copy, and whose attention lies in memory as its ``view`` expects.

    The exporter decomposes masked attention into operators whose result lies otherwise in memory
    than that of the fused one, and then fails at the ``view`` that comes after it. Attention over
    anything but four dims it does not translate at all: that is written out.
    """
    copied = copy.deepcopy(program)
    for node in list(copied.graph.nodes):
        if node.target is _ATEN.view.default:
            node.target = _ATEN.reshape.default
        elif node.target is _ATEN.scaled_dot_product_attention.default:
            plain = _contiguous if _rank(node.args[0]) == 4 else _written_out
            plain(copied.graph, node)
    copied.graph.eliminate_dead_code()
    copied.graph_module.recompile()
    return copied


def _rank(node: Any) -> int:
    return len(node.meta["val"].shape)


def _contiguous(graph: Graph, node: Node) -> None:
    """The result of attention in row-major order."""
    with graph.inserting_after(node):
        kwargs: Any = {"memory_format": torch.contiguous_format}
        plain = graph.call_function(_ATEN.clone.default, (node,), kwargs)
    plain.meta = dict(node.meta)
    node.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)


def _written_out(graph: Graph, node: Node) -> None:
    """``softmax(q·kᵀ·scale + mask)·v`` over any number of leading dims."""
    if argument(node, 5, "is_causal", False) or argument(node, 7, "enable_gqa", False):
        return
    q, k, v = node.args[:3]
    mask, scale = argument(node, 3, "attn_mask"), argument(node, 6, "scale")
    assert isinstance(q, Node)
    scale = 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale

    def call(operator: Any, *args: Any) -> Node:
        return graph.call_function(operator, args)

    with graph.inserting_before(node):
        scores = call(_ATEN.matmul.default, q, call(_ATEN.transpose.int, k, -2, -1))
        scores = call(_ATEN.mul.Tensor, scores, scale)
        if isinstance(mask, Node):
            value = mask.meta["val"]
            assert isinstance(value, Tensor)
            if value.dtype == torch.bool:
                hidden = call(_ATEN.logical_not.default, mask)
                scores = call(_ATEN.masked_fill.Scalar, scores, hidden, -math.inf)
            else:
                scores = call(_ATEN.add.Tensor, scores, mask)
        result = call(_ATEN.matmul.default, call(_ATEN.softmax.int, scores, -1), v)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
