"""Weights that a forward standardises before it uses them: NFNets, BiT, weight norm.

``batch_norm(W.reshape(1, rows, -1), training=True)`` gives each row of W mean 0 and variance 1,
and ``_weight_norm(v, g)`` each slice of v the norm g, whatever the input is. So the statistics can
be taken once and for all, before any column is cut: the export does.
"""

from __future__ import annotations

from torch.fx import Node

from l0prune.infer.nodes import (
    IDENTITIES,
    OF_ALL,
    RESHAPES,
    argument,
    norm_dim,
    operator_name,
    shape_of,
)

_OWN_STATISTICS = 5  # the argument: of what it is given, or those that were kept


def takes_own_statistics(node: Node) -> bool:
    """Does a batch or instance norm use the statistics of what it is given?"""
    return len(node.args) <= _OWN_STATISTICS or bool(node.args[_OWN_STATISTICS])


def weight_behind(node: Node) -> Node | None:
    """The stored tensor whose rows or slices ``node`` standardises; None if it does not.

    Nothing else may use the tensor, since what is stored is to become the standardised one.
    """
    name = operator_name(node.target)
    if name == "aten._weight_norm":
        return None if norm_dim(node) == OF_ALL else _stored(node.args[0], node)
    if name != "aten.batch_norm" or not takes_own_statistics(node):
        return None
    keeps = any(isinstance(argument(node, n, ""), Node) for n in (3, 4))
    shape = shape_of(node) or []
    stored = _stored(node.args[0], node)
    if keeps or stored is None or len(shape) < 3 or shape[0] != 1:
        return None
    return stored if (shape_of(stored) or [0])[0] == shape[1] else None


def dims_of_statistics(node: Node) -> list[int]:
    """The dims of such a node that the statistics go over."""
    rank = len(shape_of(node) or [])
    own = norm_dim(node) if operator_name(node.target) == "aten._weight_norm" else 1
    return [dim for dim in range(rank) if dim != own]


def has_statistics(node: Node) -> bool:
    """Is the node, but for its shape, a weight that has been standardised?"""
    return weight_behind(_unmoved(node)) is not None


def standardised(node: Node) -> Node | None:
    """The stored tensor that ``node`` is, row by row standardised; None if it is no such thing."""
    top = _unmoved(node)
    stored = weight_behind(top) if operator_name(top.target) == "aten.batch_norm" else None
    is_same_shape = stored is not None and shape_of(stored) == shape_of(node)
    return stored if is_same_shape else None


def _unmoved(node: Node) -> Node:
    """What the node is the same values of, in another shape."""
    while operator_name(node.target) in (*RESHAPES, *IDENTITIES):
        if not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return node


def _stored(source: object, user: Node) -> Node | None:
    """The stored tensor that ``source`` is, but for its shape, if all of it is for ``user``."""
    if not isinstance(source, Node):
        return None
    if any(_takes_values(each, source) for each in source.users if each is not user):
        return None
    if source.op != "call_function":
        return source
    is_moved = operator_name(source.target) in (*RESHAPES, *IDENTITIES)
    return _stored(source.args[0], source) if is_moved else None


def _takes_values(user: Node, of: Node) -> bool:
    """Or does it only ask for the shape?"""
    name = operator_name(user.target)
    is_like = name in ("aten.reshape_as", "aten.view_as") and user.args[0] is not of
    return not (is_like or name == "aten.sym_size")
