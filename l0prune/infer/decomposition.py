"""Decomposition of operators without a rule into operators with one, as torch defines it.

``aten.tensordot`` is a matrix product between two views, ``aten.diff`` a difference of two slices.
The calls that replace them have rules, and compute the same by torch's definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from l0prune.capture.compat import (
    FakeTensor,
    OpOverload,
    core_aten_decompositions,
    pytree,
)
from l0prune.capture.inlining import decomposed, finish, inline_graph
from l0prune.capture.provenance import origin_of
from l0prune.infer.nodes import (
    IDENTITIES,
    dtype_of,
    has_tensor,
    is_pointwise,
    operator_name,
    shape_of,
)
from l0prune.infer.registry import registered

_PRODUCTS = ("aten.linear", "aten.matmul", "aten.mm")


def take_apart(program: ExportedProgram) -> None:
    """Decompose calls without a rule into calls that have one, in place, where torch can.

    A call that would leave another one without a rule stays as it is: the user knows its name.
    """
    module = program.graph_module
    _drop_identities(module)
    renamed = []
    unknown = [node for node in module.graph.nodes if _is_unknown(node)]
    recipes = _recipes() if unknown else {}
    for node in unknown:
        inner = _made_of(node, recipes)
        if inner is None:
            continue
        new, names = inline_graph(module, node, inner, node.all_input_nodes)
        for each in new:
            each.meta |= origin_of(node)
        renamed += names
    finish(program, renamed)


def _drop_identities(module: GraphModule) -> None:
    """Replace products with an identity matrix, as DoRA has them, by the other factor."""
    for node in list(module.graph.nodes):
        name = operator_name(node.target)
        is_product = node.op == "call_function" and name in _PRODUCTS and len(node.args) > 1
        if not is_product or any(user.op == "output" for user in node.users):
            continue
        first, second, *bias = node.args
        left = None if any(bias) or node.kwargs else _other_than_identity(node, first, second)
        if left is None:
            continue
        if name == "aten.linear" and left is second:
            with module.graph.inserting_before(node):
                left = module.graph.call_function(torch.ops.aten.t.default, (left,))
            left.meta |= node.meta
        node.replace_all_uses_with(left)
        module.graph.erase_node(node)
        module.graph.eliminate_dead_code()
        module.recompile()


def _other_than_identity(node: Node, first: Any, second: Any) -> Node | None:
    """Return the other factor of a product with an identity matrix; None without one."""
    for one, other in ((first, second), (second, first)):
        is_matrix = len(shape_of(other) or ()) == 2 or one is second
        if is_matrix and dtype_of(other) == dtype_of(node) and _is_identity(one):
            return other  # type: ignore[no-any-return]
    return None


def _is_identity(node: Node) -> bool:
    while operator_name(node.target) in IDENTITIES and isinstance(node.args[0], Node):
        node = node.args[0]
    sizes = shape_of(node) or [0, 1]
    return operator_name(node.target) == "aten.eye" and sizes[0] == sizes[1]


def _is_unknown(node: Node) -> bool:
    is_call = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_call and _has_no_rule(node.target) and has_tensor(node)


def _has_no_rule(operator: Any) -> bool:
    return registered(operator_name(operator)) is None and not is_pointwise(operator)


def _recipes() -> dict[Any, Any]:
    """Return torch's decompositions of the operators without a rule."""
    return {
        operator: made
        for operator, made in core_aten_decompositions().items()
        if isinstance(operator, OpOverload) and _has_no_rule(operator)
    }


def _made_of(node: Node, recipes: Mapping[Any, Any]) -> GraphModule | None:
    """Return a call's decomposition as a graph over its tensors and sizes; None without one."""
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    fakes = [value for value in values if isinstance(value, FakeTensor)]
    if not fakes or any(value is None for value in values):
        return None
    try:
        traced = decomposed(node, values, recipes, fakes[0].fake_mode)
    except Exception:  # torch has no decomposition for this call
        return None
    is_known = not any(n.op == "get_attr" or _is_unknown(n) for n in traced.graph.nodes)
    return traced if is_known and _agrees(traced, node) else None


def _agrees(traced: GraphModule, node: Node) -> bool:
    """Check that the graph gives tensors of the same shapes and dtypes as the call."""
    (output,) = traced.graph.find_nodes(op="output")
    found = pytree.tree_map_only(Node, lambda n: n.meta.get("val"), output.args[0])
    mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(node.meta["val"])
    return len(mine) == len(theirs) and all(
        isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(mine, theirs, strict=True)
    )
