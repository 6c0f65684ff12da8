"""Values of a graph that no input and no parameter changes: what a constant index picks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from l0prune.capture.capture import Captured
from l0prune.capture.compat import FakeTensor, OpOverload, schema_of
from l0prune.infer.nodes import IDENTITIES, operator_name

_MOST = 1 << 16  # entries of a value that is looked at, at most


def known_positions(captured: Captured, index: Node, size: int) -> tuple[int, ...] | None:
    """The positions along a dim of this size that an index vector names; None if unknown.

    They are unknown where they depend on inputs or parameters, change from run to run, or where
    the model is on the meta device, which has no values.
    """
    value = _value(captured, index)
    if value is None or value.ndim != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    positions = tuple(int(i) % size for i in value.tolist())
    return positions if bool(((-size <= value) & (value < size)).all()) else None


def _value(captured: Captured, node: Node) -> Tensor | None:
    """The tensor that a node always is."""
    if any(_is_written(user, node) for user in node.users):
        return None
    if node.op == "placeholder":
        return _stored(captured, node)
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    values = {operand: _value(captured, operand) for operand in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    try:
        with torch.no_grad(), torch.device("cpu"):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            result = target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    except Exception:  # whatever does not run alone is not known
        return None
    is_small = isinstance(result, Tensor) and result.numel() <= _MOST
    return result if is_small and not result.is_meta else None


def _stored(captured: Captured, node: Node) -> Tensor | None:
    """A buffer or constant as it is stored; no parameter, since those learn."""
    signature, program = captured.program.graph_signature, captured.program
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    name = names.get(node.name)
    found = program.state_dict.get(name, program.constants.get(name)) if name else None
    if not isinstance(found, Tensor) or isinstance(found, FakeTensor) or found.is_meta:
        return None
    return found.cpu() if found.numel() <= _MOST else None


def _is_written(user: Node, node: Node) -> bool:
    """Does this call change the node's value in place?"""
    schema = schema_of(user.target)
    writes = schema is not None and schema.is_mutable and user.args[:1] == (node,)
    return writes and operator_name(user.target) not in IDENTITIES
