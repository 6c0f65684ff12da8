"""Contractions: linear layers, convolutions, matrix products, einsum, embeddings, attention."""

from __future__ import annotations

from math import prod as product
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from l0prune.capture.compat import size_hint
from l0prune.infer.nodes import argument, operands, operator_name, shape_of
from l0prune.infer.registry import NotFollowed, Value, of_operand, rule, some
from l0prune.infer.rules.mixing import shares_in
from l0prune.infer.solver import COPIES, Expr, prod
from l0prune.plan.layout import Const

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from l0prune.infer.inference import Inference


def _biased(node: Node, operands: Sequence[bool | None]) -> bool:
    """x·W + b is zero where x or W is, and the bias too."""
    bias = argument(node, 2, "bias")
    products, rest = (operands, ()) if bias is None else (operands[:2], operands[2:])
    return any(o is True for o in products) and all(o is True for o in rest)


def _biased_of_two(node: Node, operands: Sequence[bool | None]) -> bool:
    """x·W·x' + b is zero where one of the three is, and the bias too."""
    return some(node, operands[:3]) and all(o is True for o in operands[3:])


@rule("aten.linear", zero=_biased)
def linear(infer: Inference, node: Node) -> Value:
    """``(…, i) @ (o, i)ᵀ + (o)``."""
    x, weight = operands(node, 2)
    bias = argument(node, 2, "bias")
    *batch, inner = infer.dims(x)
    infer.solver.unify(inner, infer.dims(weight)[1])
    infer.read(inner, node, (weight, 1), x)
    outer = infer.dims(weight)[0]
    infer.write(outer, node, weight, 0)
    _tie_bias(infer, node, bias, outer)
    _work(infer, node, (*batch, outer), weight, 1)
    return (*batch, outer)


def _tie_bias(infer: Inference, node: Node, bias: Any, outer: Expr) -> None:
    if isinstance(bias, Node):
        infer.solver.unify(outer, infer.dims(bias)[0])
        infer.write(outer, node, bias, 0)


def _work(infer: Inference, node: Node, dims: tuple[Expr, ...], weight: Node, *inner: int) -> None:
    """Work over the output's dims and the inner dims of the weight."""
    places = [infer.whole_place(weight, dim) for dim in inner]
    loose = [infer.dims(weight)[d] for d, p in zip(inner, places, strict=True) if p is None]
    infer.work(node, (*dims, *loose), *places)


@rule(
    *(f"aten.conv{n}d" for n in (1, 2, 3)),
    *(f"aten.conv_transpose{n}d" for n in (1, 2, 3)),
    "aten.convolution",
    zero=_biased,
)
def convolution(infer: Inference, node: Node) -> Value:
    """Input ``g × i``, output ``g × o``: a group is carried like a batch, i is contracted.

    Depthwise is the case i = 1, an ordinary convolution the case g = 1. A transposed one
    stores its weight as ``(g × i, o, …)`` instead of ``(g × o, i, …)``.
    """
    x, weight = operands(node, 2)
    bias = argument(node, 2, "bias")
    name = operator_name(node.target)
    transposed = "transpose" in name or (name == "aten.convolution" and bool(node.args[6]))
    groups = _groups(node, name)
    spatial = len(shape_of(weight) or ()) - 2
    dims = list(infer.dims(x))
    channel = len(dims) - spatial - 1
    rows, columns = infer.dims(weight)[:2]
    group = infer.solver.fresh(groups)
    if transposed:
        inner = infer.solver.factor(rows, groups)[1] if groups > 1 else rows
        outer, read_dim, write_dim = columns, 0, 1
    else:
        inner, read_dim, write_dim = columns, 1, 0
        outer = infer.solver.fresh((shape_of(weight) or [0])[0] // groups) if groups > 1 else rows
    infer.solver.unify(dims[channel], prod((group, inner)))
    infer.solver.unify(rows, prod((group, inner if transposed else outer)))
    out = prod((infer.solver.resolve(group), infer.solver.resolve(outer)))
    if inner.size > 1 or groups == 1:  # a depthwise one reads only the slots that it writes
        infer.read(inner, node, (weight, read_dim), x)
    infer.write(out, node, weight, write_dim)
    if transposed and groups > 1:
        infer.write(infer.dims(weight)[0], node, weight, 0, inner=True)
    if groups > 1 and (inner.size > 1 or outer.size > 1):
        infer.kind(group, "group")
    _tie_bias(infer, node, bias, out)
    shape = shape_of(node) or []
    before, after, area = dims[:channel], [], []
    stays = list(_is_alone(node, name, spatial))
    for place, dim in enumerate(dims[channel + 1 :]):
        if not stays[place]:
            infer.solver.pin(dim, "a convolution slides over it")
        size = shape[channel + 1 + place]
        after.append(dim if stays[place] else Const(size, "a spatial dimension"))
        area.append(dim if stays[place] else Const(dim.size if transposed else size))
    area.append(Const(product((shape_of(weight) or [])[2:])))
    # Work: each output slot times each input slot of its own group, at every position.
    if transposed:
        infer.work(node, (*before, *area, prod((group, inner)), outer))
    else:
        _work(infer, node, (*before, *area, out), weight, 1)
    return (*before, out, *after)


def _is_alone(node: Node, name: str, spatial: int) -> Iterator[bool]:
    """Yield for each spatial dim whether each position is computed from itself alone."""
    kernel = (shape_of(argument(node, 1, "weight")) or [])[2:]
    ways = {"stride": (3, 1), "padding": (4, 0)}
    if name == "aten.convolution":
        ways["output_padding"] = (7, 0)
    elif "transpose" in name:
        ways["output_padding"] = (5, 0)
    for dim in range(spatial):
        given = {key: argument(node, at, key, least) for key, (at, least) in ways.items()}
        each = {
            key: value[min(dim, len(value) - 1)] if isinstance(value, list | tuple) else value
            for key, value in given.items()
        }
        padded = each["padding"] not in (0, "valid", "same")
        yield kernel[dim] == 1 == each["stride"] and not padded and not each.get("output_padding")


def _groups(node: Node, name: str) -> int:
    position = 8 if name == "aten.convolution" else 6
    groups = argument(node, position, "groups", 1)
    if isinstance(groups, Node):  # as many as the batch has examples
        groups = size_hint(groups.meta.get("val"))
    if not isinstance(groups, int):
        raise NotFollowed("a size of the input says how many groups it has")
    return groups


def _biased_at_four(node: Node, operands: Sequence[bool | None]) -> bool:
    """x·W + b, with b the fifth operand."""
    known = dict(zip(node.all_input_nodes, operands, strict=True))
    x, weight, _, _, bias = (known[each] for each in node.args[:5])  # type: ignore[index]
    return (x is True or weight is True) and bias is True


@rule("torchvision.deform_conv2d", zero=_biased_at_four)
def deformable_convolution(infer: Inference, node: Node) -> Value:
    """Convolution at positions shifted by offsets, which are the same for a group's channels."""
    x, weight, offset, mask, bias = (each for each in node.args[:5] if isinstance(each, Node))
    groups, offset_groups = (int(each) for each in node.args[11:13])  # type: ignore[arg-type]
    batch, channel = infer.dims(x)[:2]
    rows, inner = infer.dims(weight)[:2]
    for operand in (offset, mask):
        infer.pin_all(operand, "it says where a deformable convolution looks")
    for several, dim in ((groups, rows), (groups, channel), (offset_groups, channel)):
        if several > 1:
            group = infer.solver.factor(dim, several)[0]
            infer.solver.pin(group, "it is a group of a deformable convolution")
    infer.solver.unify(channel, prod((Const(groups), inner)))
    infer.read(inner, node, (weight, 1), x)
    infer.write(rows, node, weight, 0)
    _tie_bias(infer, node, bias, rows)
    *_, height, width = (Const(s, "a spatial dimension") for s in shape_of(node) or [])
    area = Const(height.size * width.size * product((shape_of(weight) or [])[2:]))
    _work(infer, node, (batch, area, rows), weight, 1)
    return (batch, rows, height, width)


@rule(*(f"aten.{name}" for name in ("matmul", "mm", "bmm", "mv", "dot", "vdot")), zero=some)
def matmul(infer: Inference, node: Node) -> Value:
    """``(…, n, k) @ (…, k, m)`` with broadcast batch dims; either may be a vector."""
    a, b = operands(node, 2)
    return contract(infer, node, a, b)


def _added(node: Node, operands: Sequence[bool | None]) -> bool:
    """c + a·b is zero where c is, and a or b."""
    return operands[0] is True and some(node, operands[1:])


@rule("aten.addmm", "aten.baddbmm", "aten.addbmm", zero=_added)
def addmm(infer: Inference, node: Node) -> Value:
    """``c + a @ b``: the product's dims, tied to c's."""
    c, a, b = node.args[:3]
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    out = contract(infer, node, a, b)
    if isinstance(c, Node):
        for mine, theirs in zip(reversed(out), reversed(infer.dims(c)), strict=False):
            if theirs.size > 1:
                infer.solver.unify(mine, theirs)
        infer.write(out[-1], node, c, len(infer.dims(c)) - 1)
    return out


def contract(infer: Inference, node: Node, a: Node, b: Node) -> tuple[Expr, ...]:
    """Return the dims of a matrix product; record its reads, writes and work."""
    left, right = list(infer.dims(a)), list(infer.dims(b))
    inner_a = left.pop()
    inner_b = right.pop(-2 if len(right) > 1 else -1)
    weight_dim = max(len(right) - 1, 0)
    shares = shares_in(infer, node, (a, len(left)), (b, weight_dim))
    if shares is None:
        infer.solver.unify(inner_a, inner_b)
    elif shares is a:
        inner_a = inner_b
    stored = infer.place(b, weight_dim) is not None
    stored_a = infer.place(a, len(left)) is not None
    if stored or not stored_a:
        infer.read(inner_a, node, (b, weight_dim), a)
    else:
        infer.read(inner_a, node, (a, len(left)), b)
    rank = len(left)
    rows = [left.pop()] if left else []
    columns = [right.pop()] if right else []
    if rows and columns and infer.is_weight(a) and infer.is_weight(b):
        # a weight of low rank: what columns write, rows read
        infer.write(inner_a, node, a, rank, inner=True)
    if not stored and not stored_a:
        name_heads(infer, left, [inner_a, *columns])
    if columns:
        infer.write(columns[0], node, b, len(infer.dims(b)) - 1)
    if rows:
        infer.write(rows[0], node, a, len(infer.dims(a)) - 2)
    batch = _broadcast(infer, left, right)
    out = (*batch, *rows, *columns)
    place = infer.whole_place(b, weight_dim)
    infer.work(node, out if place else (*out, infer.solver.resolve(inner_a)), place)
    return out


def name_heads(infer: Inference, batch: list[Expr], dims: list[Expr]) -> None:
    """Record the dims of a product of two computed tensors as heads and head dims."""
    for expr in dims if batch else ():
        infer.kind(expr, "head_dim")
    for expr in batch:
        infer.kind(expr, "head")


def _broadcast(infer: Inference, left: list[Expr], right: list[Expr]) -> list[Expr]:
    """Batch dims of a product, aligned at the last."""
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    out = list(longer)
    for back, dim in enumerate(reversed(shorter), start=1):
        if out[-back].size == 1:
            out[-back] = dim
        elif dim.size > 1:
            infer.solver.unify(out[-back], dim)
    return out


@rule("aten.embedding", zero=of_operand(0))
def embedding(infer: Inference, node: Node) -> Value:
    """Rows of a table by index: the rows that are read depend on the data."""
    weight, index = operands(node, 2)
    return (*infer.dims(index), _chosen_rows(infer, node, weight))


@rule("aten.embedding_renorm")
def embedding_renorm(infer: Inference, node: Node) -> Value:
    """Rows with a norm above ``max_norm``, scaled down in place."""
    weight = node.args[0]
    assert isinstance(weight, Node)
    infer.pin_all(weight, "{who} scales its rows in place (max_norm)")
    return infer.dims(weight)


def _chosen_rows(infer: Inference, node: Node, weight: Node) -> Expr:
    """Pin the rows of a table, which the input chooses, and return its other dim."""
    table, dim = infer.dims(weight)
    infer.solver.pin(table, "rows of an embedding table are chosen by the input's values")
    infer.write(dim, node, weight, 1)
    return dim


@rule("aten.embedding_bag", zero=of_operand(0))
def embedding_bag(infer: Inference, node: Node) -> Value:
    """Sums, means or maxima of a table's rows; the other results are counts of rows."""
    weight = node.args[0]
    assert isinstance(weight, Node)
    dim = _chosen_rows(infer, node, weight)
    for operand in node.all_input_nodes[1:]:
        infer.pin_all(operand, "it is used as an index")
    results = infer.opaque(node, "a count of rows")
    assert isinstance(results, list)
    return [(results[0][0], dim), *results[1:]]


@rule("aten.bilinear", zero=_biased_of_two)
def bilinear(infer: Inference, node: Node) -> Value:
    """``y_o = Σ_ij x_i W_oij x'_j + b_o``."""
    first, second, weight = operands(node, 3)
    *batch, left = infer.dims(first)
    *others, right = infer.dims(second)
    outer, *inner = infer.dims(weight)
    for mine, theirs in zip([*batch, left, right], [*others, *inner], strict=True):
        infer.solver.unify(mine, theirs)
    infer.read(left, node, (weight, 1), first)
    infer.read(right, node, (weight, 2), second)
    infer.write(outer, node, weight, 0)
    _tie_bias(infer, node, argument(node, 3, "bias"), outer)
    _work(infer, node, (*batch, outer), weight, 1, 2)
    return (*batch, outer)


@rule("aten.einsum", zero=some)
def einsum(infer: Inference, node: Node) -> Value:
    """Letters tie dims; a letter absent from the output is contracted."""
    equation, operands = node.args[:2]
    assert isinstance(operands, list | tuple)
    nodes = [operand for operand in operands if isinstance(operand, Node)]
    inputs, output = spelled_out(str(equation), [len(infer.dims(operand)) for operand in nodes])
    apart = _apart(infer, node, nodes, inputs, output)
    letters: dict[str, Expr] = {}
    where: dict[str, list[tuple[Node, int]]] = {}
    for labels, operand in zip(inputs, nodes, strict=True):
        for position, (letter, dim) in enumerate(zip(labels, infer.dims(operand), strict=True)):
            if (operand, letter) in apart:
                continue
            known = letters.setdefault(letter, dim)
            if known.size == 1:  # stretched, as by an elementwise product
                letters[letter] = dim
            elif dim.size > 1:
                infer.solver.unify(known, dim)
            where.setdefault(letter, []).append((operand, position))
    for letter, dim in letters.items():
        whole = [(n, p) for n, p in where[letter] if infer.dims(n)[p].size == dim.size]
        stored = [(n, p) for n, p in whole if infer.place(n, p) is not None]
        if letter in output:
            for operand, position in stored:
                infer.write(dim, node, operand, position)
        else:
            infer.read(dim, node, stored[0] if stored else None, *nodes)
    if not any(infer.place(*found) for founds in where.values() for found in founds):
        carried = {letter for letter in output if len(where[letter]) > 1}
        batch = [dim for letter, dim in letters.items() if letter in carried]
        name_heads(infer, batch, [dim for letter, dim in letters.items() if letter not in carried])
    for contracted in _products(inputs, output):
        infer.work(node, tuple(dim for letter, dim in letters.items() if letter in contracted))
    return tuple(letters[letter] for letter in output)


def _products(inputs: list[list[str]], output: list[str]) -> Iterator[set[str]]:
    """Yield the letters of each product of two matrices that torch computes, from left to right.

    A letter of only one of the two, which occurs nowhere later, is summed before. Without a letter
    to sum over, the product is elementwise, which is not counted.
    """
    known = {*inputs[0]}
    for number, labels in enumerate(inputs[1:], 2):
        later = {*output}.union(*inputs[number:])
        summed = (known & {*labels}) - later
        if summed:
            yield (known | {*labels}) & (later | summed)
        known = (known | {*labels}) & later


def _apart(
    infer: Inference,
    node: Node,
    nodes: list[Node],
    inputs: list[list[str]],
    output: list[str],
) -> set[tuple[Node, str]]:
    """Return the shares of kernels, with the letter that is not tied to that of the kernels."""
    if len(nodes) != 2:
        return set()
    found = set[tuple[Node, str]]()
    for letter in set(inputs[0]) & set(inputs[1]) - set(output):
        pair = [(n, labels.index(letter)) for n, labels in zip(nodes, inputs, strict=True)]
        shares = shares_in(infer, node, pair[0], pair[1])
        if shares is not None:
            found.add((shares, letter))
    return found


def spelled_out(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return a letter for each dim of the operands and of the output.

    The dims of an ellipsis are called 0, 1, … from the last, as they are broadcast. Without an
    arrow, the output has them, and then the letters that occur once, in alphabetical order.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    widths = [rank - len(t.replace("...", "")) for t, rank in zip(texts, ranks, strict=True)]
    inputs = [_letters(text, width) for text, width in zip(texts, widths, strict=True)]
    if arrow:
        return inputs, _letters(right, max(widths))
    once = sorted(letter for letter in set(left) - set(".,") if left.count(letter) == 1)
    return inputs, [*_letters("..." if "..." in left else "", max(widths)), *once]


def _letters(text: str, width: int) -> list[str]:
    """Return the letters of one operand, whose ellipsis has ``width`` dims."""
    before, dots, after = text.partition("...")
    return [*before, *(str(n) for n in reversed(range(width if dots else 0))), *after]


# The output mixes rows of v, so it is zero exactly where v is.
@rule("aten.scaled_dot_product_attention", zero=of_operand(2))
def attention(infer: Inference, node: Node) -> Value:
    """``softmax(q·kᵀ)·v`` over dims (…, head, position, head dim)."""
    q, k, v = operands(node, 3)
    *batch, rows, inner = infer.dims(q)
    *batch_k, columns, inner_k = infer.dims(k)
    *batch_v, columns_v, outer = infer.dims(v)
    grouped = bool(argument(node, 7, "enable_gqa", False))
    for mine, theirs in ((batch, batch_k), (batch, batch_v)):
        _tie_batch(infer, mine, theirs, grouped)
    infer.solver.unify(inner, inner_k)
    infer.solver.unify(columns, columns_v)
    infer.solver.pin(columns, "a softmax over positions normalises it")
    infer.read(inner, node, None, q, k)
    infer.kind(inner, "head_dim")
    infer.kind(outer, "head_dim")
    if batch:
        infer.kind(batch[-1], "head")
    _tie_mask(infer, node, [*batch, rows, columns])
    infer.work(node, (*batch, rows, columns, infer.solver.resolve(inner)))
    infer.work(node, (*batch, rows, columns, outer))
    return (*batch, rows, outer)


def _tie_batch(infer: Inference, mine: list[Expr], theirs: list[Expr], grouped: bool) -> None:
    for position, (a, b) in enumerate(zip(reversed(mine), reversed(theirs), strict=False)):
        if position == 0 and grouped and a.size != b.size:
            infer.solver.unify(a, prod((b, Const(a.size // b.size, COPIES))))
        elif a.size == b.size:
            infer.solver.unify(a, b)


def _tie_mask(infer: Inference, node: Node, scores: list[Expr]) -> None:
    mask = argument(node, 3, "attn_mask")
    if isinstance(mask, Node):
        for score, dim in zip(reversed(scores), reversed(infer.dims(mask)), strict=False):
            if dim.size == score.size > 1:
                infer.solver.unify(score, dim)
