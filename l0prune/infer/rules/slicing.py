"""Operators that split and join tensors: cat, split, slice, select, pad, index."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from l0prune.capture.capture import Captured
from l0prune.capture.compat import FakeTensor, OpOverload, schema_of
from l0prune.infer.nodes import (
    CONCATENATIONS,
    IDENTITIES,
    SLICES,
    SPLITS,
    argument,
    arguments,
    dtype_of,
    hint,
    is_pointwise,
    operator_name,
    shape_of,
    written,
)
from l0prune.infer.registry import RULES, ZEROS, NotFollowed, Value, each, of_operand, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.solver import SINGLE, Expr, cat, pick
from l0prune.plan.layout import Const

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l0prune.infer.inference import Inference


_MOST = 1 << 16  # most entries of a value that is computed here


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
    """Return the tensor of a node if it is the same in each run, else None."""
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
    except Exception:  # a call that does not run by itself is not known
        return None
    is_small = isinstance(result, Tensor) and result.numel() <= _MOST
    return result if is_small and not result.is_meta else None


def _stored(captured: Captured, node: Node) -> Tensor | None:
    """Return a stored buffer or constant; None for parameters, which are trained."""
    signature, program = captured.program.graph_signature, captured.program
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    name = names.get(node.name)
    found = program.state_dict.get(name, program.constants.get(name)) if name else None
    if not isinstance(found, Tensor) or isinstance(found, FakeTensor) or found.is_meta:
        return None
    return found.cpu() if found.numel() <= _MOST else None


def _is_written(user: Node, node: Node) -> bool:
    """Check whether this call changes the node's value in place."""
    schema = schema_of(user.target)
    writes = schema is not None and schema.is_mutable and user.args[:1] == (node,)
    return writes and operator_name(user.target) not in IDENTITIES


@rule(*CONCATENATIONS, zero=each)
def concatenate(infer: Inference, node: Node) -> Value:
    """One dim is the concatenation of the parts' dims, the others are tied."""
    # torch.cat takes an empty vector among tensors of any rank, and leaves it out
    every = _nodes(node.args[0])
    parts = [infer.dims(part) for part in every if (shape_of(part) or [0]) != [0]]
    if not parts:
        return infer.opaque(node, "a concatenation of nothing")
    dim = int(argument(node, 1, "dim", 0)) % len(parts[0])
    out = list(parts[0])
    for position in range(len(out)):
        if position == dim:
            out[dim] = cat(part[dim] for part in parts)
        else:
            _tie(infer, [part[position] for part in parts])
    return tuple(out)


@rule("aten.stack", zero=each)
def stack(infer: Inference, node: Node) -> Value:
    """A new dim that counts the parts; all others are tied."""
    parts = [infer.dims(part) for part in _nodes(node.args[0])]
    for dims in zip(*parts, strict=True):
        _tie(infer, list(dims))
    out: list[Expr] = list(parts[0])
    out.insert(int(argument(node, 1, "dim", 0)) % (len(out) + 1), Const(len(parts), "a stack"))
    return tuple(out)


def _nodes(argument: Any) -> list[Node]:
    return [part for part in argument if isinstance(part, Node)]


def _tie(infer: Inference, dims: list[Expr]) -> None:
    for dim in dims[1:]:
        infer.solver.unify(dims[0], dim)


@rule(*SPLITS, "aten.unbind", zero=each)
def split(infer: Inference, node: Node) -> Value:
    """Pieces of a dim, with the sizes that they have on the example."""
    pieces = node.meta["val"]
    dims = infer.dims(source(node))
    is_unbind = "unbind" in str(node.target)
    position = 1 if is_unbind else 2
    dim = int(argument(node, position, "dim", 0)) % len(dims)
    out: list[tuple[Expr, ...]] = []
    rest = dims[dim]
    for piece in pieces:
        size = 1 if is_unbind else hint(piece.shape[dim])
        first, rest = infer.solver.split(rest, size)
        middle = () if is_unbind else (first,)
        out.append((*dims[:dim], *middle, *dims[dim + 1 :]))
    return out


def getitem(infer: Inference, node: Node) -> Value:
    """One of several outputs."""
    values = infer.values.get(source(node))
    if not isinstance(values, list):
        return None
    return values[int(node.args[1])]  # type: ignore[arg-type]


# getitem is a plain Python function, not an ATen operator.
RULES[operator.getitem.__name__] = getitem
ZEROS[operator.getitem.__name__] = each


@rule(*SLICES, zero=each)
def slice_(infer: Inference, node: Node) -> Value:
    """A range of a dim; with a step, one of each ``step`` neighbours."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    dim = int(argument(node, 1, "dim", 0)) % len(dims)
    whole, size = dims[dim], shape[dim]
    if whole.size == size:
        return dims
    start = argument(node, 2, "start", 0) or 0
    step = int(argument(node, 4, "step", 1)) if "slice" in str(node.target) else 1
    if not isinstance(start, int):
        infer.solver.pin(whole, "it is sliced at a place that depends on the input's size")
        return (*dims[:dim], Const(size), *dims[dim + 1 :])
    start = max(start + whole.size if start < 0 else start, 0)
    piece = _strided(infer, whole, start, size, step)
    return (*dims[:dim], piece, *dims[dim + 1 :])


def _strided(infer: Inference, whole: Expr, start: int, size: int, step: int) -> Expr:
    if step == 1:
        after = infer.solver.split(whole, start)[1]
        return infer.solver.split(after, size)[0]
    if whole.size % step == 0 and start < step:
        outer, inner = infer.solver.factor(whole, whole.size // step)
        infer.solver.pin(inner, f"every {step}th slot is taken from it")
        return outer
    infer.solver.pin(whole, "it is sliced with a step that does not divide it")
    return Const(size)


@rule("aten.select", zero=each)
def select(infer: Inference, node: Node) -> Value:
    """One position of a dim, which therefore cannot be cut."""
    dims = infer.dims(source(node))
    dim = int(node.args[1]) % len(dims)  # type: ignore[arg-type]
    infer.solver.pin(dims[dim], SINGLE)
    return (*dims[:dim], *dims[dim + 1 :])


def _padded(node: Node, operands: Sequence[bool | None]) -> bool:
    """Zero where the operand is and the padding is zero, too."""
    position = 2 if "constant_pad_nd" in str(node.target) else 3
    return each(node, operands) and not argument(node, position, "value")


@rule("aten.pad", "aten.constant_pad_nd", zero=_padded)
def pad(infer: Inference, node: Node) -> Value:
    """Padded dims: constants around the slots where the padding is constant."""
    widths = list(node.args[1])  # type: ignore[arg-type]
    constant = argument(node, 2, "mode", "constant") == "constant" or "constant" in str(node.target)
    dims, shape = list(infer.dims(source(node))), shape_of(node) or []
    for back in range(len(widths) // 2):
        position = len(dims) - 1 - back
        before, after = widths[2 * back : 2 * back + 2]
        if before == 0 and after == 0:
            continue
        dim = dims[position]
        if constant and all(isinstance(w, int) and w >= 0 for w in (before, after)):
            border = (Const(before, "padding"), Const(after, "padding"))
            dims[position] = cat((border[0], dim, border[1]))
        else:
            infer.solver.pin(dim, "it is padded from itself or cropped")
            dims[position] = Const(shape[position], "a padded dimension")
    return tuple(dims)


@rule("aten.flip", zero=each)
def flip(infer: Inference, node: Node) -> Value:
    """Slots in the opposite order along some dims."""
    dims = list(infer.dims(source(node)))
    named: Any = node.args[1]
    for dim in named:
        dims[dim] = pick(dims[dim], tuple(reversed(range(dims[dim].size))))
    return tuple(dims)


@rule("aten.roll", zero=each)
def roll(infer: Inference, node: Node) -> Value:
    """Slots of some dims in cyclic shift."""
    dims = list(infer.dims(source(node)))
    shifts, named = node.args[1], argument(node, 2, "dims")
    if not named:
        infer.pin_all(source(node), "it is rolled over all its positions")
        return infer.opaque(node, "a rolled tensor")
    for shift, dim in zip(shifts, named, strict=True):  # type: ignore[arg-type]
        size = dims[dim].size
        dims[dim] = pick(dims[dim], tuple((at - shift) % size for at in range(size)))
    return tuple(dims)


@rule("aten.index", zero=each)
def index(infer: Inference, node: Node) -> Value:
    """Positions chosen by index tensors: one constant index picks slots, others pin the dims."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    chosen = list(node.args[1])  # type: ignore[arg-type]
    given = [position for position, i in enumerate(chosen) if i is not None]
    if len(given) == 1 and (picked := _picked(infer, node, given[0], chosen[given[0]])):
        return (*dims[: given[0]], picked, *dims[given[0] + 1 :])
    indexed, place = _indexed(infer, dims, chosen)
    rest = [dim for position, dim in enumerate(dims) if position not in indexed]
    count = len(shape) - len(rest)
    fresh = [Const(s, "indexed positions") for s in shape[place : place + count]]
    return (*rest[:place], *fresh, *rest[place:])


def _indexed(
    infer: Inference, dims: Sequence[Expr], chosen: Sequence[Node | None]
) -> tuple[list[int], int]:
    """Pin the indexed dims; return their numbers, and where the chosen positions are inserted.

    A mask indexes as many dims as it has.
    """
    indexed: list[int] = []
    position = 0
    for index in chosen:
        is_mask = index is not None and dtype_of(index) in (torch.bool, torch.uint8)
        width = len(shape_of(index) or []) if index is not None and is_mask else 1
        if index is not None:
            infer.pin_all(index, "it is used as an index")
            indexed += range(position, position + width)
        position += width
    for number in indexed:
        infer.solver.pin(dims[number], "its positions are chosen by an index tensor")
    adjacent = bool(indexed) and indexed[-1] - indexed[0] == len(indexed) - 1
    return indexed, indexed[0] if adjacent else 0


def _picked(infer: Inference, node: Node, dim: int, index: Any) -> Expr | None:
    """Return the slots of a dim that a constant index picks; None if the index is not known."""
    whole = infer.dims(source(node))[dim]
    if isinstance(whole, Const) or not isinstance(index, Node):
        return None
    positions = known_positions(infer.captured, index, whole.size)
    if positions is None or (infer.is_weight(source(node)) and len(positions) > whole.size):
        return None  # the rows of a table, such as one of relative positions, are no slots
    infer.pin_all(index, "it is used as an index")
    infer.picks[node.name] = positions
    if len(positions) == 1:  # a dim of one says nothing of its slots where it is stretched
        infer.solver.pin(whole, SINGLE)
    return pick(whole, positions)


@rule("aten.nonzero", "aten.nonzero_numpy", "aten.masked_select")
def nonzero(infer: Inference, node: Node) -> Value:
    """Positions where a tensor is not zero, or the values there; as many as the data decide."""
    for operand in node.all_input_nodes:
        infer.pin_all(operand, "its values decide which positions are chosen")
    return infer.opaque(node, "chosen positions")


def _put(node: Node, operands: Sequence[bool | None]) -> bool:
    """Zero where both the target and the written values are, for any index."""
    known = dict(zip(node.all_input_nodes, operands, strict=True))
    given = arguments(node)
    value = next(given[name] for name in ("src", "value", "source", "values") if name in given)
    is_zero = known.get(value) is True if isinstance(value, Node) else value == 0
    return is_zero and known.get(given["self"]) is True


_SCATTERED = "values decide which positions it is scattered to or from"


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce", zero=_put)
def scatter(infer: Inference, node: Node) -> Value:
    """Values written along one dim at positions of an index; the other dims are tied."""
    given = arguments(node)
    operands = [given["self"], given["index"], given.get("src")]
    dims, *others = (infer.dims(each) for each in operands if isinstance(each, Node))
    along = int(given["dim"]) % max(len(dims), 1)
    for position, mine, *theirs in zip(range(len(dims)), dims, *others, strict=True):
        if position != along and all(each.size == mine.size for each in theirs):
            _tie(infer, [mine, *theirs])
            continue
        for each_of in (mine, *theirs):
            infer.solver.pin(each_of, _SCATTERED)
    return tuple(map(infer.solver.resolve, dims))


@rule("aten.masked_scatter", zero=_put)
def masked_scatter(infer: Inference, node: Node) -> Value:
    """Values written, in order, where a mask is true.

    Last dims along which the mask is constant are tied: a token is written with all its channels.
    """
    x, mask, values = _nodes(node.args[:3])
    if shape_of(node) != shape_of(x):
        raise NotFollowed("the mask is larger than what it masks")
    every = [infer.dims(each)[::-1] for each in (x, mask, values)]
    dims, masks, given = every
    whole = 0
    for mine, theirs in zip(dims, given, strict=False):
        if mine.size != theirs.size or not _is_same(mask, whole):
            break
        _tie(infer, [mine, theirs, *(m for m in masks[whole : whole + 1] if m.size > 1)])
        whole += 1
    for dim in (dim for each_of in every for dim in each_of[whole:]):
        infer.solver.pin(dim, _SCATTERED)
    return infer.dims(x)


def _is_same(node: Node, back: int) -> bool:
    """Check whether a tensor is known to be the same along the dim with ``back`` after it."""
    shape = shape_of(node) or []
    if back >= len(shape) or shape[-1 - back] == 1:
        return True
    if node.op != "call_function" or any(written(user) is node for user in node.users):
        return False
    name = operator_name(node.target)
    if name in (*IDENTITIES, "aten.expand", "aten.expand_as", "aten.repeat"):
        return _is_same(source(node), back)
    return is_pointwise(node.target) and all(_is_same(o, back) for o in node.all_input_nodes)


@rule("aten.index_put", zero=_put)
def index_put(infer: Inference, node: Node) -> Value:
    """Values written at positions of dims that index tensors choose; later dims are tied."""
    given = arguments(node)
    dims = infer.dims(given["self"])
    indexed, place = _indexed(infer, dims, given["indices"])
    rest = [dim for position, dim in enumerate(dims) if position not in indexed]
    after = rest[place:]
    for back, theirs in enumerate(reversed(infer.dims(given["values"]))):
        if theirs.size > 1 and back < len(after):
            infer.solver.unify(after[-1 - back], theirs)
        else:
            infer.solver.pin(theirs, _SCATTERED)
    for dim in rest[:place]:
        infer.solver.pin(dim, _SCATTERED)
    return tuple(map(infer.solver.resolve, dims))


@rule("aten.gather", "aten.take_along_dim", zero=of_operand(0))
def gather(infer: Inference, node: Node) -> Value:
    """Positions of one dim chosen by an index; the other dims are tied to those of the index."""
    given = arguments(node)
    index, dim = given["index" if "index" in given else "indices"], given["dim"]
    why = "its positions are chosen by an index tensor"
    if dim is None:
        infer.pin_all(source(node), why)
        return infer.opaque(node, "gathered positions")
    mine, theirs = infer.dims(source(node)), infer.dims(index)
    is_stretched = "along_dim" in str(node.target)
    out: list[Expr] = []
    for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if position == int(dim) % len(mine):
            infer.solver.pin(one, why)
            out.append(other)
        elif one.size == other.size or is_stretched:
            out.append(other if one.size == 1 else one)
            if other.size > 1 < one.size:
                infer.solver.unify(one, other)
        else:  # the first positions are taken, which a cut would change
            infer.solver.pin(one, why)
            infer.solver.pin(other, why)
            out.append(other)
    return tuple(map(infer.solver.resolve, out))


@rule("aten.index_select", zero=each)
def index_select(infer: Inference, node: Node) -> Value:
    """Positions of one dim chosen by an index vector."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    dim = int(node.args[1]) % len(dims)  # type: ignore[arg-type]
    picked = _picked(infer, node, dim, node.args[2])
    if picked is not None:
        return (*dims[:dim], picked, *dims[dim + 1 :])
    infer.solver.pin(dims[dim], "its positions are chosen by an index tensor")
    whole = infer.solver.resolve(dims[dim])
    is_input = isinstance(whole, Const) and whole.is_input  # as exports begin that read less
    chosen = Const(shape[dim], "indexed positions", is_input)
    return (*dims[:dim], chosen, *dims[dim + 1 :])


@rule("aten.index_add", "aten.index_copy", zero=each)
def index_add(infer: Inference, node: Node) -> Value:
    """Slices added or written along one dim at positions of an index; the other dims are tied."""
    target, dim, index, given = node.args[:4]
    assert isinstance(target, Node)
    assert isinstance(index, Node)
    assert isinstance(given, Node)
    infer.pin_all(index, "it is used as an index")
    dims = infer.dims(target)
    for position, (mine, theirs) in enumerate(zip(dims, infer.dims(given), strict=True)):
        if position != int(dim) % len(dims):  # type: ignore[arg-type]
            infer.solver.unify(mine, theirs)
            continue
        for each_of in (mine, theirs):
            infer.solver.pin(each_of, "its positions are chosen by an index tensor")
    return tuple(map(infer.solver.resolve, dims))


@rule("aten.glu", zero=each)
def glu(infer: Inference, node: Node) -> Value:
    """``a · σ(b)`` of two halves: slot i of one belongs to slot i of the other."""
    dims = infer.dims(source(node))
    dim = int(argument(node, 1, "dim", -1)) % len(dims)
    value, gate = infer.solver.split(dims[dim], dims[dim].size // 2)
    infer.solver.unify(value, gate)
    return (*dims[:dim], infer.solver.resolve(value), *dims[dim + 1 :])


@rule("aten.tril", "aten.triu", zero=each)
def triangle(infer: Inference, node: Node) -> Value:
    """One side of a diagonal of the last two dims, which therefore stay whole."""
    dims = infer.dims(source(node))
    for dim in dims[-2:]:
        infer.solver.pin(dim, "a triangle of it is taken")
    return dims
