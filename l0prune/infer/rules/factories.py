"""Tensors made inside forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.expressions import Const
from l0prune.infer.nodes import shape_of
from l0prune.infer.registry import Value, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l0prune.infer.inference import Inference


def _always(node: Node, operands: Sequence[bool | None]) -> bool:
    return True


# Tensors whose entries are all alike can be made as large as what they meet turns out to be.
_ALIKE = "ones new_ones full new_full empty new_empty"
_ZEROS = "zeros new_zeros"
# Each slot has an entry of its own, known beforehand: an export picks those of the slots that stay.
PATTERNS = tuple(f"aten.{name}" for name in ("arange", "linspace", "logspace", "eye"))
_MADE = "tril_indices triu_indices rand randn scalar_tensor tensor"


def alike(infer: Inference, node: Node) -> Value:
    """A tensor of equal entries: each dim is whatever it meets."""
    return tuple(infer.solver.fresh(size) for size in shape_of(node) or [])


rule(*(f"aten.{name}" for name in _ALIKE.split()))(alike)
rule(*(f"aten.{name}" for name in _ZEROS.split()), zero=_always)(alike)


@rule(*PATTERNS)
def pattern(infer: Inference, node: Node) -> Value:
    """A tensor of known entries: each dim is whatever it meets, unless an input says how long."""
    return made(infer, node) if node.all_input_nodes else alike(infer, node)


@rule(*(f"aten.{name}" for name in _MADE.split()))
def made(infer: Inference, node: Node) -> Value:
    """A tensor of other entries: what it meets keeps its size."""
    return infer.opaque(node, "a tensor made inside forward")


@rule(*(f"aten.{n}_like" for n in ("ones", "full", "empty", "rand", "randn")))
def like(infer: Inference, node: Node) -> Value:
    """A tensor shaped like another."""
    source = node.args[0]
    assert isinstance(source, Node)
    return infer.dims(source)


rule("aten.zeros_like", "aten.zero_", "aten.zero", zero=_always)(like)


@rule("aten.one_hot")
def one_hot(infer: Inference, node: Node) -> Value:
    """A code for each index: a new last dim, one position for each value."""
    source = node.args[0]
    assert isinstance(source, Node)
    return (*infer.dims(source), Const((shape_of(node) or [0])[-1], "a one-hot code"))
