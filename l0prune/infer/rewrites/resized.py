"""A captured graph without its closed branches, at the sizes that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Graph

from l0prune.infer.build import Analysis
from l0prune.infer.nodes import is_assertion
from l0prune.infer.rewrites import averages, layernorm, order, standardised_weights  # noqa: F401  (register their rewrites)
from l0prune.infer.rewrites.literals import rewrite_literals
from l0prune.infer.rewrites.sizes import Sizes
from l0prune.infer.rewrites.without_branches import leave_out, pass_on
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone, under_switches


def with_switches(analysis: Analysis, plan: Plan) -> Analysis:
    """Return the analysis by its own plan with switches: so are the layouts of its nodes."""
    convert = under_switches(plan)

    def converted(layouts: Any) -> Any:
        is_many = isinstance(layouts, tuple)
        return tuple(map(converted, layouts)) if is_many else convert(layouts)

    layouts = {name: converted(of) for name, of in analysis.layouts.items()}
    return replace(analysis, plan=plan, layouts=layouts)


def rewritten(graph: Graph, analysis: Analysis, kept: Tensor, layouts: dict[str, tuple]) -> Sizes:
    """Rewrite a captured graph, in place, for tensors of which closed slots are cut.

    Args:
        graph: the captured one, in a module; operators have the names that they had in the capture.
        analysis: of it.
        kept: the slots that stay, bool, flat.
        layouts: by the name of a node in ``graph``.

    Returns:
        The sizes of what is in the graph now.
    """
    single = leave_out(graph, analysis.branches, gone(analysis.plan, kept))
    sizes = Sizes(analysis.plan, kept, layouts, analysis.picks, analysis.closed)
    rewrite_literals(graph, sizes)
    for join in single:
        pass_on(join)
    for node in list(graph.nodes):
        if is_assertion(node):
            graph.erase_node(node)
    return sizes
