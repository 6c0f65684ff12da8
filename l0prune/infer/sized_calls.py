"""The calls that are given sizes, such as those to reshape to: which dims the sizes are of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isclose
from operator import mul
from typing import Any

from torch.fx import Node

from l0prune.capture.provenance import module_of, modules_of
from l0prune.infer.build import Analysis
from l0prune.infer.nodes import RESHAPES, SIZED, SLICES, SPLITS, argument, operator_name
from l0prune.infer.rules.reduction import reduced_dims
from l0prune.plan.code import SizedCall
from l0prune.plan.layout import Const, Layout, Layouts, Prod, axes_of, size_of

# Products with a number, and what code calls them.
_PRODUCTS, SCALED = ("aten.mul", "aten.mul_"), "mul"

Given = Iterator[tuple[Any, Layout]]


def given_sizes(node: Node, analysis: Analysis) -> Given:
    """Each size among the arguments of a call, and the dim of the output that it is of."""
    name, layouts = operator_name(node.target), analysis.layouts.get(node.name, ())
    if not layouts:
        return
    if name in SIZED:
        yield from zip(node.args[SIZED[name]], layouts, strict=False)  # type: ignore[arg-type]
    elif name == "aten.unflatten":
        dim = int(node.args[1]) % (len(layouts) - len(node.args[2]) + 1)  # type: ignore[arg-type]
        yield from zip(node.args[2], layouts[dim:], strict=False)  # type: ignore[arg-type]
    elif name in SPLITS:
        dim = int(argument(node, 2, "dim", 0)) % len(layouts[0])
        given = size_of(layouts[0][dim]) if name == "aten.chunk" else node.args[1]
        each = given if isinstance(given, list | tuple) else [given] * len(layouts)
        yield from zip(each, (piece[dim] for piece in layouts), strict=False)
    elif name in SLICES and not argument(node, 2, "start", 0):
        dim = int(argument(node, 1, "dim", 0)) % len(layouts)
        yield argument(node, 3, "end"), layouts[dim]


def is_number_of(size: Any, dim: Layout) -> bool:
    """Is the size a number of the code, and that of the dim?"""
    return type(size) is int and size == size_of(dim)


def sized_calls(analysis: Analysis, unscaled: Set[Node]) -> dict[str, tuple[SizedCall, ...]]:
    """By module, the calls of the first time that it is called, where one of them is of an axis.

    Those that functions of torch make by themselves are not told from the code's own: whoever
    counts them has to look at the names, too.

    Args:
        analysis: of the model.
        unscaled: attentions whose scale follows the size of their heads.
    """
    calls: dict[str, list[SizedCall]] = defaultdict(list)
    for node in analysis.captured.graph.nodes:
        call = _call(node, analysis, unscaled) if node.op == "call_function" else None
        if call is None:
            continue
        for path in modules_of(node) or [""]:
            is_own = path == module_of(node)
            calls[path].append(call if is_own else _of_another(call))
    told = {path: tuple(_telling(each)) for path, each in calls.items() if "@" not in path}
    return {
        path: each
        for path, each in told.items()
        if any(any(map(axes_of, _known(call))) for call in each)
    }


def _of_another(call: SizedCall) -> SizedCall:
    """Return what a module knows of a call that one of its submodules makes."""
    return replace(call, sizes=(None,) * len(call.sizes), follows=None)


def _telling(calls: Sequence[SizedCall]) -> Iterator[SizedCall]:
    """Without products with numbers where none of these follows a size: there are many others."""
    has_scale = any(call.name == SCALED and any(_known(call)) for call in calls)
    return (call for call in calls if call.name != SCALED or has_scale)


def _call(node: Node, analysis: Analysis, unscaled: Set[Node]) -> SizedCall | None:
    """What a call is given of sizes, or takes off its inputs; None if nothing."""
    operator = operator_name(node.target)
    name = _python_name(operator)
    if operator == "aten.mean":
        dims = analysis.layouts.get(node.all_input_nodes[0].name, ())
        over = (dims[number] for number in reduced_dims(argument(node, 1, "dim"), len(dims)))
        return SizedCall("mean", 1, tuple(dim for dim in over if axes_of(dim)) or (None,))
    if operator == "aten.layer_norm" and len(node.args[1]) == 1:  # type: ignore[arg-type]
        last = analysis.layouts[node.name][-1]
        return SizedCall("layer_norm", 1, (last if axes_of(last) else None,))
    if operator == "aten.scaled_dot_product_attention":
        head = analysis.layouts[argument(node, 0, "query").name][-1] if node in unscaled else None
        return SizedCall(name, 1, (head,))
    if operator in _PRODUCTS:
        return _scaled(node, analysis)
    if not name:
        return None
    given, batch = list(given_sizes(node, analysis)), analysis.captured.batch
    sizes: list[Layout | None] = [None] * len(given)
    by_rows, follows = None, _follows(node, analysis)
    for place, (size, dim) in enumerate(given):
        if not is_number_of(size, dim) or dim not in follows:
            continue
        rest = without_rows(dim, batch)
        if rest == dim:
            sizes[place] = None if place == 0 and _is_rows(dim, batch) else dim
        elif operator in RESHAPES and by_rows is None and -1 not in [s for s, _ in given]:
            sizes[place], by_rows = rest, place
    return SizedCall(name, 1 if operator == "aten.split" else len(sizes), tuple(sizes), by_rows)


def _scaled(node: Node, analysis: Analysis) -> SizedCall | None:
    """A product with a number, which may be 1/√size, of its last dim or of what that was once."""
    number, dims = argument(node, 1, "other"), analysis.layouts.get(node.name, ())
    if type(number) is not float or not dims:
        return None
    size = round(number**-2) if number > 0 else 0
    if not (size and isclose(number, size**-0.5)):
        return SizedCall(SCALED, 1, (None,))
    return SizedCall(SCALED, 1, (dims[-1] if size_of(dims[-1]) == size else Const(size),))


def without_rows(dim: Layout, batch: int) -> Layout:
    """Of ``batch × heads`` the heads: the other factor follows the input, whatever is cut."""
    if not isinstance(dim, Prod) or not _is_rows(dim.factors[0], batch):
        return dim
    rest = dim.factors[1:]
    return rest[0] if len(rest) == 1 else Prod(rest)


def _is_rows(dim: Layout, batch: int) -> bool:
    """Does it seem to be the batch, or so many for each example? Another batch has others."""
    return batch > 1 and isinstance(dim, Const) and dim.size % batch == 0


def _known(call: SizedCall) -> Iterator[Layout]:
    return (dim for dim in call.sizes if dim is not None)


def _follows(node: Node, analysis: Analysis) -> set[Layout]:
    """The dims of a call's output whose size may follow from one that is cut.

    Those with an axis, and what a dim with an axis is regrouped into: of ``(heads · 32)`` that code
    reshapes to ``(heads, C // heads)`` the second stays 32, and C does not.
    """
    layouts = analysis.layouts.get(node.name, ())
    if operator_name(node.target) in SPLITS:
        return {dim for piece in layouts for dim in piece if axes_of(dim)}
    found = {dim for dim in layouts if axes_of(dim)}
    if operator_name(node.target) in RESHAPES:
        source = analysis.layouts[node.all_input_nodes[0].name]
        before, after = _ends(source), _ends(layouts)
        common = sorted(set(before) & set(after))
        for start, end in pairwise(common):
            whole = (d for d, at in zip(source, before[1:], strict=True) if start < at <= end)
            if any(map(axes_of, whole)):
                pairs = zip(layouts, after[1:], strict=True)
                found |= {d for d, at in pairs if start < at <= end}
    return found


def _ends(dims: Layouts) -> list[int]:
    """The products of the sizes so far, from 1 on."""
    return list(accumulate((size_of(dim) for dim in dims), mul, initial=1))


def _python_name(operator: str) -> str:
    """What code calls an operator that is given sizes; empty for others."""
    if operator in ("aten.split", "aten.split_with_sizes"):
        return "split"
    others = "aten.unflatten", "aten.scaled_dot_product_attention"
    return operator.removeprefix("aten.") if operator in (*SIZED, *others) else ""
