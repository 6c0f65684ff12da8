"""The same program in terms that torch's ONNX exporter can translate."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from l0prune.exporting.onnx.attention import around_its_tensors, views_that_may_copy

_ATEN = torch.ops.aten


def in_plain_terms(program: ExportedProgram) -> ExportedProgram:
    """A copy whose views may copy, and whose attention lies in memory as its ``view`` expects.

    The exporter decomposes causal attention into operators whose result lies otherwise in memory
    than that of the fused one, and then fails at the ``view`` that comes after it.
    """
    copied = around_its_tensors(program)
    views_that_may_copy(copied)
    attention = _ATEN.scaled_dot_product_attention.default
    for node in copied.graph.find_nodes(op="call_function", target=attention):
        _contiguous(copied.graph, node)
    copied.graph_module.recompile()
    return copied


def _contiguous(graph: Graph, node: Node) -> None:
    """The result of attention in row-major order."""
    with graph.inserting_after(node):
        kwargs: Any = {"memory_format": torch.contiguous_format}
        plain = graph.call_function(_ATEN.clone.default, (node,), kwargs)
    plain.meta = dict(node.meta)
    node.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)
