"""Cutting apart and putting together: cat, split, slice, select, pad, index."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from l0prune.infer.expressions import SINGLE, Const, Expr, cat, pick
from l0prune.infer.known_values import known_positions
from l0prune.infer.nodes import CONCATENATIONS, SLICES, SPLITS, argument, hint, shape_of
from l0prune.infer.registry import RULES, ZEROS, Value, each, rule
from l0prune.infer.rules.movement import source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l0prune.infer.inference import Inference


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
    """A dim in pieces, as long as the example's pieces were."""
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
    """Padding with anything but zeros puts values where there were none."""
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
    """The last slots of some dims come first."""
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
    """Positions chosen by index tensors: by a constant one slots move, else dims stay whole."""
    dims, shape = infer.dims(source(node)), shape_of(node) or []
    chosen = list(node.args[1])  # type: ignore[arg-type]
    indexed = [position for position, i in enumerate(chosen) if i is not None]
    if len(indexed) == 1 and (picked := _picked(infer, node, indexed[0], chosen[indexed[0]])):
        return (*dims[: indexed[0]], picked, *dims[indexed[0] + 1 :])
    for position in indexed:
        infer.solver.pin(dims[position], "its positions are chosen by an index tensor")
    for operand in (i for i in chosen if isinstance(i, Node)):
        infer.pin_all(operand, "it is used as an index")
    rest = [dim for position, dim in enumerate(dims) if position not in indexed]
    count = len(shape) - len(rest)
    adjacent = bool(indexed) and indexed[-1] - indexed[0] == len(indexed) - 1
    place = indexed[0] if adjacent else 0
    fresh = [Const(s, "indexed positions") for s in shape[place : place + count]]
    return (*rest[:place], *fresh, *rest[place:])


def _picked(infer: Inference, node: Node, dim: int, index: Any) -> Expr | None:
    """A dim of which a constant index picks slots, in any order; None if that is not known."""
    whole = infer.dims(source(node))[dim]
    if isinstance(whole, Const) or not isinstance(index, Node):
        return None
    positions = known_positions(infer.captured, index, whole.size)
    if positions is None or (infer.is_weight(source(node)) and len(positions) > whole.size):
        return None  # the rows of a table, as of positions relative to each other, are no slots
    infer.pin_all(index, "it is used as an index")
    infer.picks[node.name] = positions
    if len(positions) == 1:  # a dim of one says nothing of its slots where it is stretched
        infer.solver.pin(whole, SINGLE)
    return pick(whole, positions)


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce", "aten.masked_scatter")
def scatter(infer: Inference, node: Node) -> Value:
    """Put where an index says, for each position another place."""
    for operand in node.all_input_nodes:
        infer.pin_all(operand, "values decide which positions it is scattered to or from")
    return infer.opaque(node, "scattered positions")


@rule("aten.gather", "aten.take_along_dim", zero=each)
def gather(infer: Inference, node: Node) -> Value:
    """Positions of one dim chosen by values, others for each position of the other dims."""
    infer.pin_all(source(node), "its positions are chosen by an index tensor")
    return infer.opaque(node, "gathered positions")


@rule("aten.index_select", zero=each)
def index_select(infer: Inference, node: Node) -> Value:
    """Positions of one dim chosen by values, the same everywhere."""
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
    """Slices of one dim are added or put where an index says; the other dims are tied."""
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
    """What lies on one side of a diagonal: places in the last two dims have a meaning."""
    dims = infer.dims(source(node))
    for dim in dims[-2:]:
        infer.solver.pin(dim, "a triangle of it is taken")
    return dims
