"""Weights that a forward standardises: the statistics of the whole, taken before the cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from l0prune.infer.build import Analysis
from l0prune.infer.nodes import argument, operator_name, shape_of
from l0prune.infer.rewrites.literals import rewrites
from l0prune.infer.rewrites.sizes import Sizes
from l0prune.infer.standardised_weights import dims_of_statistics, weight_behind

_ATEN = torch.ops.aten


def standardised_weights(analysis: Analysis, kept: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name, the weights that are standardised and of which columns will be cut.

    Args:
        analysis: of the ungated model.
        kept: the slots that stay, bool, flat.

    Returns:
        For each what standardises it while it is whole.
    """
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    sizes = Sizes(analysis.plan, kept, analysis.layouts)
    for node in analysis.captured.graph.nodes:
        stored = weight_behind(node)
        if stored is not None and _is_cut(sizes, node):
            found[analysis.captured.names[stored.name]] = partial(_standardised_as_stored, node)
    return found


def _standardised_as_stored(node: Node, whole: Tensor) -> Tensor:
    """The weight in the shape that it is stored in; the node may have another."""
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
    """Of a weight that is stored standardised, scale and shift are left."""
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
    sizes.stands_for(result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_cut(sizes: Sizes, node: Node) -> bool:
    return any(sizes.changes(sizes.dims(node)[dim]) for dim in dims_of_statistics(node))
