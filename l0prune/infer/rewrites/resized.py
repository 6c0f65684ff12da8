"""The captured graph at its sizes after a cut, without its closed branches.

A sum without a branch is its other operand, and a concatenation has one part less. A flip needs no
rewrite. A roll shifts by the number of kept slots among those that come first, and an index names
the kept slots by their new positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from l0prune.capture.provenance import origin_of
from l0prune.infer.branches import Branches
from l0prune.infer.build import Analysis
from l0prune.infer.dataflow import Memory, joined
from l0prune.infer.nodes import argument, operator_name
from l0prune.infer.rewrites import statistics  # noqa: F401  (register their rewrites)
from l0prune.infer.rewrites.literals import (
    Sizes,
    picked,
    rewrite_literals,
    rewrites,
    stored_index,
)
from l0prune.infer.rules.movement import source
from l0prune.plan.layout import Gated
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone, under_switches


def leave_out(graph: Graph, branches: Branches, gone: Collection[str]) -> list[Node]:
    """Remove these branches, and all nodes that only they need.

    Returns:
        Joins with one operand left, as aliases of it, for ``pass_on``: rewrites of averages over
        them still need their former width and their zeros.
    """
    if not gone:
        return []
    ends: dict[Node, list[Node]] = defaultdict(list)
    for ending in branches.endings:
        for join in ending.joins if ending.name in gone else ():
            ends[join].append(ending.end)
    nodes = {node.name: node for node in graph.nodes}
    single = []
    for join, out in ends.items():
        # Select operands by index: an earlier iteration may have replaced nested joins.
        node, parts = nodes[join.name], joined(nodes[join.name])
        left = [parts[place] for place, each in enumerate(joined(join)) if each not in out]
        if len(left) > 1:
            node.args = (left, *node.args[1:])
        else:
            node.target, node.args, node.kwargs = torch.ops.aten.alias.default, tuple(left), {}
            single.append(node)
    dead = {node.name for node in branches.dead(gone)}
    needless = {node.name for node, of in branches.needs.items() if not of}
    for node in graph.nodes:  # assertions, and writes that nothing reads
        if node.name in needless and any(of.name in dead for of in node.all_input_nodes):
            dead.add(node.name)
    for node in reversed(list(graph.nodes)):
        # torch's own elimination keeps nodes that write in place or may draw random numbers
        if node.name in dead and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return [node for node in single if node in graph.nodes]


def pass_on(join: Node) -> None:
    """Replace a join by its only operand, or by a copy of it where their memory is written.

    A later write into the join must not change the operand, nor the other way round.
    """
    (left,) = join.all_input_nodes
    memory = Memory(join.graph)  # the join is an alias: both share it
    is_written = any(writer > join for writer in memory.writers(left))
    if is_written and (len(left.users) > 1 or memory.base(left) is not left):
        with join.graph.inserting_before(join):
            left = join.graph.call_function(torch.ops.aten.clone.default, (left,))
    join.replace_all_uses_with(left)
    join.graph.erase_node(join)


@rewrites("aten.roll")
def roll(sizes: Sizes, node: Node) -> None:
    """Set each shift to the number of kept slots among those that come first."""
    dims, shifts, new = sizes.dims(source(node)), node.args[1], []
    named: Any = argument(node, 2, "dims") or []
    for shift, dim in zip(shifts if named else (), named, strict=True):  # type: ignore[arg-type]
        size, mask = dims[dim].size, sizes.mask(dims[dim])
        first = shift % size  # this many of the last come first
        new.append(int(mask[size - first :].sum()) if sizes.changes(dims[dim]) else shift)
    if named:
        node.update_arg(1, new)


@rewrites("aten.index", "aten.index_select")
def index(sizes: Sizes, node: Node) -> None:
    """Replace a constant index by the new positions of the kept slots."""
    if node.name not in sizes.picks:
        return
    chosen: Any = node.args[1]
    by_list = isinstance(chosen, list | tuple)
    dim = next(n for n, i in enumerate(chosen) if i is not None) if by_list else int(chosen)
    mask = sizes.mask(sizes.dims(source(node))[dim])
    if bool(mask.all()):
        return
    positions = torch.tensor(sizes.picks[node.name])
    places = (mask.cumsum(0) - 1)[positions[mask[positions]]]
    with node.graph.inserting_before(node):
        new = stored_index(node, places, f"picked_by_{node.name}")
    if by_list:
        node.update_arg(1, [None if i is None else new for i in chosen])
    else:
        node.update_arg(2, new)


def with_switches(analysis: Analysis, plan: Plan) -> Analysis:
    """Return the analysis with a plan that has switches, in the layouts of its nodes, too."""
    convert = under_switches(plan)

    def converted(layouts: Any) -> Any:
        is_many = isinstance(layouts, tuple)
        return tuple(map(converted, layouts)) if is_many else convert(layouts)

    layouts = {name: converted(of) for name, of in analysis.layouts.items()}
    return replace(analysis, plan=plan, layouts=layouts)


def rewritten(graph: Graph, analysis: Analysis, kept: Tensor, layouts: dict[str, tuple]) -> Sizes:
    """Rewrite a captured graph, in place, for tensors of which closed slots are cut.

    ``layouts`` are by the names of its nodes. Returns the sizes of the rewritten graph.
    """
    single = leave_out(graph, analysis.branches, gone(analysis.plan, kept))
    sizes = Sizes(analysis.plan, kept, layouts, analysis.picks, analysis.closed)
    rewrite_literals(graph, sizes)
    for join in single:
        pass_on(join)
    for node in list(graph.nodes):
        if node.op == "call_function" and operator_name(node.target) == _OF_OLD_SIZES:
            graph.erase_node(node)
    _insert_gathers(graph, sizes)
    _pick_shares(graph, analysis, sizes)
    return sizes


_OF_OLD_SIZES = "aten._assert_tensor_metadata"
_KEPT_INPUTS = "kept_inputs_of_"  # prefix of buffers with the indices of picked inputs


def _insert_gathers(graph: Graph, sizes: Sizes) -> None:
    """Insert a gather of the kept inputs before each Linear with gates on single columns."""
    for node in list(graph.nodes):
        if node.op != "call_function" or operator_name(node.target) != "aten.linear":
            continue
        source, weight = node.args[:2]
        columns = sizes.dims(weight)[1] if weight.name in sizes.layouts else None
        if not isinstance(columns, Gated):
            continue
        fine = sizes.mask(columns)[sizes.mask(columns.base)]
        if bool(fine.all()):
            continue
        with graph.inserting_before(node):
            gather = picked(source, -1, fine, f"{_KEPT_INPUTS}{weight.name}")
        gather.meta.update(origin_of(node))
        node.replace_input_with(source, gather)


def _pick_shares(graph: Graph, analysis: Analysis, sizes: Sizes) -> None:
    """Insert a gather of the kept kernels' shares before each mix of kernels."""
    nodes = {node.name: node for node in graph.nodes}
    for name, mixed in analysis.mixed.items():
        kept = sizes.mask(analysis.layouts[mixed.kernels][mixed.kernels_dim])
        node, shares = nodes.get(name), nodes.get(mixed.shares)
        if node is None or shares is None or bool(kept.all()):
            continue
        with graph.inserting_before(node):
            gather = picked(shares, mixed.shares_dim, kept, f"{_KEPT_INPUTS}{name}")
        gather.meta.update(origin_of(node))
        node.replace_input_with(shares, gather)
