"""Conversion of writes ``x[torch.where(c)] = v`` of one value v to masked fills.

The number of positions at which a condition holds depends on the data, and a graph with such a
tensor cannot be cut. The condition itself has a known size: ``x.masked_fill_(c, v)`` writes the
same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from l0prune.capture.assertions import erase_if_asserted
from l0prune.capture.provenance import origin_of

_ATEN = torch.ops.aten
_POSITIONS = (_ATEN.where.default, _ATEN.nonzero_numpy.default)
_FILLS = {
    _ATEN.index_put_.default: _ATEN.masked_fill_.Tensor,
    _ATEN.index_put.default: _ATEN.masked_fill.Tensor,
}


def fill_by_mask(program: ExportedProgram) -> None:
    """Replace writes of a value at the positions of a condition by masked fills, in place."""
    positions = [node for node in program.graph.nodes if node.target in _POSITIONS]
    for node in positions:
        for write in list(_writes(node)):
            _fill(node, write)
        erase_if_asserted(node)
    if positions:
        program.graph_module.recompile()


def _writes(positions: Node) -> Iterator[Node]:
    """Yield each write of one value at exactly these positions."""
    parts = {user.args[1]: user for user in positions.users if user.target is operator.getitem}
    every = [parts.get(dim) for dim in range(_condition(positions).ndim)]
    for user in every[0].users if every and every[0] else ():
        if user.target in _FILLS and [*user.args[1]] == every and _is_one(user.args[2:]):  # type: ignore[misc]
            yield user


def _is_one(values: Any) -> bool:
    """Return whether a write is of one value, without accumulation."""
    return len(values) == 1 and values[0].meta["val"].ndim == 0


def _condition(positions: Node) -> Any:
    return positions.all_input_nodes[0].meta["val"]


def _fill(positions: Node, write: Node) -> None:
    """Change a write to use the condition as a mask, from where the positions are computed."""
    given: Any = write.args
    x, _, value = given
    graph, condition = write.graph, _condition(positions)
    with condition.fake_mode, graph.inserting_before(positions):
        mask = graph.call_function(_ATEN.ne.Scalar, (positions.args[0], 0))
        mask.meta = origin_of(write) | {"val": condition != 0}
        for _ in range(x.meta["val"].ndim - condition.ndim):
            last = mask
            mask = graph.call_function(_ATEN.unsqueeze.default, (last, -1))
            mask.meta = origin_of(write) | {"val": last.meta["val"].unsqueeze(-1)}
    write.target, write.args = _FILLS[write.target], (x, mask, value)  # type: ignore[index]
