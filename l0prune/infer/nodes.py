"""Properties of graph nodes, and weights that a forward standardises before it uses them.

``batch_norm(W.reshape(1, rows, -1), training=True)`` gives each row of W mean 0 and variance 1,
and ``_weight_norm(v, g)`` each slice of v the norm g, whatever the input is (NFNets, BiT, weight
norm). So the statistics can be taken once and for all, before any column is cut: the export does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from l0prune.capture.compat import OpOverload, schema_of, size_hint
from l0prune.capture.provenance import source_of


def operator_name(target: Any) -> str:
    """``aten.conv2d`` for the overload ``aten.conv2d.default``; a function's own name else."""
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{schema_of(target).name.split('::')[-1]}"
    return getattr(target, "__name__", str(target))


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of a torch operator's call by name: as given, or by default."""
    named = schema_of(node.target).arguments
    given = {each.name: each.default_value for each in named if each.has_default_value()}
    given |= {each.name: value for each, value in zip(named, node.args, strict=False)}
    return given | dict(node.kwargs)


def operands(node: Node, count: int) -> list[Node]:
    """Return the first ``count`` arguments of a call, which are all nodes."""
    found = [each for each in node.args[:count] if isinstance(each, Node)]
    assert len(found) == count
    return found


def valued(node: Node) -> list[Node]:
    """Return the operands whose values, not only shape or dtype, determine the node's value.

    A size has none, also if it is free: a graph with a free batch has the plan of a fixed one.
    """
    name = operator_name(node.target).removeprefix("aten.")
    if name == "sym_size":
        return []
    if name in ("type_as", "expand_as", "view_as", "reshape_as"):
        return node.all_input_nodes[:1]
    is_shaped = name.startswith("new_") or name.endswith("_like")
    return [] if is_shaped else node.all_input_nodes


def hint(size: Any) -> int:
    """A size as a number; a symbolic one as it was in the example."""
    found = size_hint(size)
    assert found is not None
    return found


def shape_of(node: Node) -> list[int] | None:
    """The shape of a node's tensor, None if it is none."""
    value = node.meta.get("val")
    return [hint(size) for size in value.shape] if isinstance(value, Tensor) else None


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor, None if it is none."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def is_writer(node: Node) -> bool:
    """Check whether the operator writes into an operand."""
    schema = schema_of(node.target)
    return schema is not None and bool(schema.is_mutable)


def written(node: Node) -> Node | None:
    """The operand that the node writes into; None where there is none."""
    first = node.args[0] if is_writer(node) and node.args else None
    return first if isinstance(first, Node) else None


def may_view(node: Node) -> bool:
    """Check whether the result may lie in the memory of an operand."""
    schema = schema_of(node.target)
    return schema is not None and any(each.alias_info for each in schema.returns)


def has_tensor(node: Node) -> bool:
    """Check whether the node yields at least one tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) for v in values)


# Elementwise operators without a tag in torch 2.11.
_UNTAGGED = frozenset({
    "aten._conj_physical", "aten.celu_", "aten.elu_", "aten.hardsigmoid_", "aten.hardtanh_",
    "aten.leaky_relu", "aten.leaky_relu_", "aten.selu_",
})  # fmt: skip


def is_pointwise(target: Any) -> bool:
    """Check whether the operator is elementwise, as torch's tag says."""
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or operator_name(target) in _UNTAGGED


def called(node: Node) -> str:
    """The call's operator and where the user's code makes it: ``aten.relu at model.py:12``."""
    return " at ".join(filter(None, (operator_name(node.target), source_of(node))))


def is_assertion(node: Node) -> bool:
    """Check for a call that only asserts: dtype and strides before a cast, or a number's range.

    It is no part of the function.
    """
    return node.op == "call_function" and operator_name(node.target) in _ASSERTIONS


_ASSERTIONS = frozenset({
    "aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
})  # fmt: skip


def draws(node: Node) -> bool:
    """Check whether the call draws random numbers: noise, or a dropout that is on."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    operator = node.target
    may = torch.Tag.nondeterministic_seeded in operator.tags
    if not may and not any(word in str(operator) for word in ("dropout", "rrelu", "attention")):
        return False
    given = arguments(node)
    for switch in ("train", "training", "dropout_p"):
        if switch in given:
            return bool(given[switch])
    return may


OF_ALL = -1  # the dim argument of _weight_norm for one norm of the whole tensor


def norm_dim(node: Node) -> int:
    """Return the dim along which _weight_norm has one norm per slice, or ``OF_ALL``."""
    return int(argument(node, 2, "dim", 0))


# Operators that only permute the dims, and operators that leave dims and values unchanged.
PERMUTATIONS = tuple(
    f"aten.{name}"
    for name in (
        "t", "transpose", "swapaxes", "swapdims", "permute", "numpy_T", "mT", "adjoint",
        "matrix_H", "movedim", "moveaxis",
    )
)  # fmt: skip
IDENTITIES = tuple(
    f"aten.{name}"
    for name in (
        "contiguous", "clone", "detach", "detach_", "alias", "to", "_to_copy", "type_as", "float",
        "half", "bfloat16", "double", "lift_fresh_copy", "lift_fresh", "resolve_conj",
        "resolve_neg", "positive",
    )
)  # fmt: skip

# Operators that split a dim into ranges, or take one range; all keep the number of dims.
SPLITS = tuple(f"aten.{name}" for name in ("split", "split_with_sizes", "chunk", "tensor_split"))
SLICES = ("aten.slice", "aten.narrow")
CONCATENATIONS = ("aten.cat", "aten.concat", "aten.concatenate")
PIECES = ("getitem", *SPLITS, *SLICES)

# Row-major regroupings of the dims.
RESHAPES = tuple(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "ravel",
    )
)  # fmt: skip


# Operators that take the sizes of their output, with the position of that argument.
SIZED = dict.fromkeys(
    (f"aten.{name}" for name in ("view", "reshape", "_unsafe_view", "expand", "broadcast_to")), 1
)
SIZED |= dict.fromkeys((f"aten.new_{name}" for name in ("ones", "zeros", "full", "empty")), 1)
SIZED |= dict.fromkeys((f"aten.{name}" for name in ("ones", "zeros", "full", "empty")), 0)


def dim_order(node: Node, rank: int) -> list[int]:
    """Return the source dim of each output dim of a permutation."""
    name = operator_name(node.target).removeprefix("aten.")
    order = list(range(rank))
    if name == "numpy_T":
        return order[::-1]
    if name == "permute":
        return _dims(node.args[1], rank)
    if name in ("movedim", "moveaxis"):
        froms, tos = _dims(node.args[1], rank), _dims(node.args[2], rank)
        rest = [dim for dim in order if dim not in froms]
        moved = dict(zip(tos, froms, strict=True))
        return [moved[place] if place in moved else rest.pop(0) for place in order]
    if rank > 1:
        given = node.args[1:3] or (-2, -1)  # mT, t and adjoint name none
        a, b = _dims(list(given), rank)
        order[a], order[b] = order[b], order[a]
    return order


def _dims(given: Any, rank: int) -> list[int]:
    return [int(dim) % rank for dim in (given if isinstance(given, list | tuple) else [given])]


_OWN_STATISTICS = 5  # the argument: statistics of the input, or running ones


def takes_own_statistics(node: Node) -> bool:
    """Check whether a batch or instance norm uses the statistics of its input."""
    return len(node.args) <= _OWN_STATISTICS or bool(node.args[_OWN_STATISTICS])


def weight_behind(node: Node) -> Node | None:
    """The stored tensor whose rows or slices ``node`` standardises; None if it does not.

    No other node may use the tensor, since an export stores the standardised one instead.
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
    """Return the dims over which a standardising node takes statistics."""
    rank = len(shape_of(node) or [])
    own = norm_dim(node) if operator_name(node.target) == "aten._weight_norm" else 1
    return [dim for dim in range(rank) if dim != own]


def has_statistics(node: Node) -> bool:
    """Check whether the node is a standardised weight, in whatever shape."""
    return weight_behind(_unmoved(node)) is not None


def standardised(node: Node) -> Node | None:
    """Return the stored tensor of which ``node`` is the row-wise standardised form, or None."""
    top = _unmoved(node)
    stored = weight_behind(top) if operator_name(top.target) == "aten.batch_norm" else None
    is_same_shape = stored is not None and shape_of(stored) == shape_of(node)
    return stored if is_same_shape else None


def _unmoved(node: Node) -> Node:
    """Return the node behind reshapes and identities."""
    while operator_name(node.target) in (*RESHAPES, *IDENTITIES):
        if not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return node


def _stored(source: object, user: Node) -> Node | None:
    """Return the stored tensor that ``source`` reshapes, if only ``user`` takes its values."""
    if not isinstance(source, Node):
        return None
    if any(_takes_values(each, source) for each in source.users if each is not user):
        return None
    if source.op != "call_function":
        return source
    is_moved = operator_name(source.target) in (*RESHAPES, *IDENTITIES)
    return _stored(source.args[0], source) if is_moved else None


def _takes_values(user: Node, of: Node) -> bool:
    """Check whether a user takes the values, not only the shape."""
    name = operator_name(user.target)
    is_like = name in ("aten.reshape_as", "aten.view_as") and user.args[0] is not of
    return not (is_like or name == "aten.sym_size")
