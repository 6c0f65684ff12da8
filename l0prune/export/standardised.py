"""Weights that a forward standardises: the statistics of the whole, taken before the cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Node

from l0prune.axes import Analysis
from l0prune.axes.nodes import argument, shape_of
from l0prune.axes.standardised import weight_behind
from l0prune.export.literals import rewrites
from l0prune.export.sizes import Sizes

_COLUMNS = 2  # the dim of ``(1, rows, columns)``


def with_statistics_taken(
    analysis: Analysis, tensors: Mapping[str, Tensor], kept: Tensor
) -> dict[str, Tensor]:
    """The whole tensors, with those standardised of which columns will be cut.

    Args:
        analysis: of the ungated model.
        tensors: folded, in float64, by name.
        kept: the slots that stay, bool, flat.
    """
    taken = dict(tensors)
    sizes = Sizes(analysis.plan, kept, analysis.layouts)
    for node in analysis.captured.graph.nodes:
        stored = weight_behind(node)
        if stored is not None and _is_cut(sizes, node):
            name = analysis.captured.names[stored.name]
            rows = taken[name].reshape(shape_of(node) or [])
            eps = float(argument(node, 7, "eps"))
            normal = torch.nn.functional.batch_norm(rows, None, None, training=True, eps=eps)
            taken[name] = normal.reshape(taken[name].shape)
    return taken


@rewrites("aten.batch_norm")
def batch_norm(sizes: Sizes, node: Node) -> None:
    """Of a weight that is stored standardised, scale and shift are left."""
    if weight_behind(node) is None or not _is_cut(sizes, node):
        return
    result, graph = node.args[0], node.graph
    for operand, operator in ((1, torch.ops.aten.mul.Tensor), (2, torch.ops.aten.add.Tensor)):
        by_row = node.args[operand]
        if isinstance(by_row, Node):
            with graph.inserting_before(node):
                column = graph.call_function(torch.ops.aten.unsqueeze.default, (by_row, -1))
                result = graph.call_function(operator, (result, column))
    assert isinstance(result, Node)
    sizes.layouts[result.name] = sizes.dims(node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_cut(sizes: Sizes, node: Node) -> bool:
    return any(sizes.changes(layout) for layout in sizes.dims(node)[_COLUMNS:])
