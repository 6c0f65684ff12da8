"""Sizes that the code of the user's modules needs to run in a cut model.

A captured graph has its sizes as literals, which are rewritten there. A module's forward takes
them from the module's attributes, or has them in its code; and it averages over as many values as
it receives. Both are recorded here, by module, from the nodes of its forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from math import isclose
from operator import mul
from typing import Any

from torch import nn
from torch.fx import Node

from l0prune.capture.provenance import is_within, module_of, modules_of, without_call
from l0prune.infer.build import Analysis
from l0prune.infer.nodes import (
    RESHAPES,
    SIZED,
    SLICES,
    SPLITS,
    argument,
    operator_name,
    shape_of,
    weight_behind,
)
from l0prune.infer.query_scale import query_factors
from l0prune.infer.registry import explained
from l0prune.infer.rules.reduction import TELLING, reduced_dims
from l0prune.plan.code import PARTS, Code, ReusedSize, SizedCall
from l0prune.plan.layout import Cat, Const, Layout, Layouts, Prod, Slots, axes_of, leaves
from l0prune.plan.plan import Plan

# Products with a number, and what code calls them.
_PRODUCTS, SCALED = ("aten.mul", "aten.mul_"), "mul"

Given = Iterator[tuple[Any, Layout]]


def given_sizes(node: Node, analysis: Analysis) -> Given:
    """Yield each size among the arguments of a call, with the output dim that has it."""
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
        given = layouts[0][dim].size if name == "aten.chunk" else node.args[1]
        each = given if isinstance(given, list | tuple) else [given] * len(layouts)
        yield from zip(each, (piece[dim] for piece in layouts), strict=False)
    elif name in SLICES and not argument(node, 2, "start", 0):
        dim = int(argument(node, 1, "dim", 0)) % len(layouts)
        yield argument(node, 3, "end"), layouts[dim]


def is_number_of(size: Any, dim: Layout) -> bool:
    """Check whether the size is an int in the code, and equal to that of the dim."""
    return type(size) is int and size == dim.size


def sized_calls(analysis: Analysis, unscaled: Set[Node]) -> dict[str, tuple[SizedCall, ...]]:
    """Return by module the sized calls of its first run, where one of them depends on an axis.

    Calls that functions of torch make are not distinguished from those of the module's code: who
    counts them has to compare the names, too.

    ``unscaled`` are the attentions whose scale follows the size of their heads.
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
    """Return a submodule's call as the outer module sees it: without the sizes."""
    return replace(call, sizes=(None,) * len(call.sizes), follows=None)


def _telling(calls: Sequence[SizedCall]) -> Iterator[SizedCall]:
    """Return the calls, without products with numbers if none of these depends on a size."""
    has_scale = any(call.name == SCALED and any(_known(call)) for call in calls)
    return (call for call in calls if call.name != SCALED or has_scale)


def _call(node: Node, analysis: Analysis, unscaled: Set[Node]) -> SizedCall | None:
    """Return a call with the sizes that it is given or reads off its inputs; None without any."""
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
    """Return a product with a number; if the number is 1/√size, with a dim of that size."""
    number, dims = argument(node, 1, "other"), analysis.layouts.get(node.name, ())
    if type(number) is not float or not dims:
        return None
    size = round(number**-2) if number > 0 else 0
    if not (size and isclose(number, size**-0.5)):
        return SizedCall(SCALED, 1, (None,))
    return SizedCall(SCALED, 1, (dims[-1] if dims[-1].size == size else Const(size),))


def without_rows(dim: Layout, batch: int) -> Layout:
    """Return a dim without a leading batch factor: the heads of ``batch × heads``."""
    if not isinstance(dim, Prod) or not _is_rows(dim.factors[0], batch):
        return dim
    rest = dim.factors[1:]
    return rest[0] if len(rest) == 1 else Prod(rest)


def _is_rows(dim: Layout, batch: int) -> bool:
    """Check for a constant dim that is a multiple of the batch."""
    return batch > 1 and isinstance(dim, Const) and dim.size % batch == 0


def _known(call: SizedCall) -> Iterator[Layout]:
    return (dim for dim in call.sizes if dim is not None)


def _follows(node: Node, analysis: Analysis) -> set[Layout]:
    """Return the dims of a call's output whose size may depend on a dim that is cut.

    These have an axis, or come from regrouping a dim with an axis: of ``(heads · 32)`` that code
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
    """Return the cumulative products of the sizes, starting with 1."""
    return list(accumulate((dim.size for dim in dims), mul, initial=1))


def _python_name(operator: str) -> str:
    """Return the Python name of an operator that takes sizes; empty for others."""
    if operator in ("aten.split", "aten.split_with_sizes"):
        return "split"
    others = "aten.unflatten", "aten.scaled_dot_product_attention"
    return operator.removeprefix("aten.") if operator in (*SIZED, *others) else ""


Regions = dict[str, list[Node]]

_NORMS = ("aten.layer_norm", "aten.group_norm", "aten.rms_norm")


@explained
def with_code(analysis: Analysis, model: nn.Module) -> Analysis:
    """Add the sizes in the model's code to the plan; dims that share one number are ``alike``."""
    plan, regions = analysis.plan, _regions(analysis)
    every = _sizes(analysis, regions)
    received = {path: _received(analysis, regions, path) for path in every}
    factors = query_factors(analysis)
    code = Code(
        sizes=_not_received(every, received),
        averages=_averages(analysis, regions, model),
        queries=tuple(chain.from_iterable(filter(None, factors.values()))),
        reused=tuple(_reused(model, every, received)),
        calls=sized_calls(analysis, {node for node, known in factors.items() if known is None}),
        standardised=tuple(_standardised(analysis)),
        by_name=plan.code.by_name,
    )
    alike = (*_equal_pieces(analysis), *_of_one_number(plan, model, every, _beside(analysis)))
    return replace(analysis, plan=replace(plan, code=code, alike=tuple(dict.fromkeys(alike))))


def _standardised(analysis: Analysis) -> Iterator[str]:
    """The names of the weights that some module standardises."""
    captured = analysis.captured
    behind = filter(None, map(weight_behind, captured.graph.nodes))
    return (captured.names[stored.name] for stored in behind)


def _regions(analysis: Analysis) -> Regions:
    """Return by path the calls of each module's forward, without those of its submodules."""
    regions: Regions = defaultdict(list)
    for node in analysis.captured.graph.nodes:
        if node.op == "call_function":  # a module that is called again is path@1
            regions[without_call(module_of(node))].append(node)
    return regions


def _received(analysis: Analysis, regions: Regions, path: str) -> set[Layout]:
    """Return the dims of a module's inputs, also of those that only its submodules read."""
    below = [nodes for each, nodes in regions.items() if is_within(each, path)]
    return {dim for each in _inputs(analysis, list(chain(*below))) for dim in each}


# --- numbers --------------------------------------------------------------------------------


def _sizes(analysis: Analysis, regions: Regions) -> dict[str, Layouts]:
    """Return by module the dims whose sizes its code gives as numbers, if one has an axis.

    Dims of the same size without an axis are included: the number may be theirs.
    """
    result = {}
    for path, nodes in regions.items():
        dims = list(dict.fromkeys(chain.from_iterable(_given(n, analysis) for n in nodes)))
        cut = {dim.size for dim in dims if axes_of(dim)}
        if cut:
            result[path] = tuple(dim for dim in dims if dim.size in cut)
    return result


def _not_received(
    sizes: Mapping[str, Layouts], received: Mapping[str, set[Layout]]
) -> dict[str, Layouts]:
    """Remove the dims that an input of the module has: their size was probably read off that.

    They stay where no other dim has that size.
    """
    result = {}
    for path, dims in sizes.items():
        others = {dim.size for dim in dims if dim not in received[path]}
        result[path] = tuple(
            dim
            for dim in dims
            if dim not in received[path] or not axes_of(dim) or dim.size not in others
        )
    return result


def _reused(
    model: nn.Module, sizes: Mapping[str, Layouts], received: Mapping[str, set[Layout]]
) -> Iterator[ReusedSize]:
    """Yield the sizes that a module's code gives without an attribute of that value.

    It reads them off an input of the same width, or has them as literals.
    """
    for path, dims in sizes.items():
        values = _numbers(model, path)
        for used in dims:
            is_known = any(used.size * parts in values for parts in PARTS)
            if is_known or used in received[path] or not axes_of(used):
                continue
            read = [dim for dim in received[path] if axes_of(dim)]
            alike = [dim for dim in read if dim.size == used.size]
            unrelated = (dim.size % used.size and used.size % dim.size for dim in read)
            if alike or all(unrelated):  # else it may be computed, correctly
                yield ReusedSize(path, alike[0] if alike else None, used)


def _numbers(model: nn.Module, path: str) -> set[int]:
    """Return the whole numbers among a module's attributes."""
    return {each for each in vars(model.get_submodule(path)).values() if type(each) is int}


def _given(node: Node, analysis: Analysis) -> Iterator[Layout]:
    """The dims of a call's output whose size is a number among its arguments."""
    batch = analysis.captured.batch
    given = given_sizes(node, analysis)
    return (without_rows(dim, batch) for size, dim in given if is_number_of(size, dim))


# --- averages -------------------------------------------------------------------------------


def _averages(analysis: Analysis, regions: Regions, model: nn.Module) -> dict[str, Layouts]:
    """Return the dims of the only input of each innermost module that averages over an axis.

    Of several calls the first one counts: the inputs may be of different rank.
    """
    found = {}
    for path, nodes in regions.items():
        if any(axes_of(dim) for node in nodes for dim in _averaged(node, analysis)):
            first = [node for node in nodes if _call_of(node) == _call_of(nodes[0])]
            inputs = set(_inputs(analysis, first))
            if len(inputs) == 1 and not any(True for _ in model.get_submodule(path).children()):
                found[path] = inputs.pop()
    return found


def _call_of(node: Node) -> str:
    """Return torch.export's name for the call of the module that made this node."""
    return next(reversed(node.meta.get("nn_module_stack") or ()), "")


def _averaged(node: Node, analysis: Analysis) -> Layouts:
    """The dims that a call averages over."""
    name = operator_name(node.target)
    if name not in (*_NORMS, *TELLING):
        return ()
    source = node.args[0]
    dims: Layouts = analysis.layouts.get(source.name, ()) if isinstance(source, Node) else ()
    if not dims:
        return ()
    if name == "aten.group_norm":
        return dims[1:] if node.args[1] == 1 else ()
    if name in _NORMS:
        return dims[-len(node.args[1]) :]  # type: ignore[arg-type]
    return tuple(dims[d] for d in reduced_dims(argument(node, 1, "dim"), len(dims)))


def _inputs(analysis: Analysis, region: list[Node]) -> Iterator[Layouts]:
    """Yield the dims of each tensor, stored ones excepted, that a region reads from outside."""
    own = set(region)
    for node in dict.fromkeys(each for own_node in region for each in own_node.all_input_nodes):
        is_stored = node.name in analysis.captured.names
        if node not in own and not is_stored and shape_of(node) is not None:
            yield analysis.layouts[node.name]


# --- dims of one number ---------------------------------------------------------------------


def _of_one_number(
    plan: Plan, model: nn.Module, sizes: Mapping[str, Layouts], beside: Mapping[Layout, set[Layout]]
) -> Iterator[Layouts]:
    """Yield groups of dims whose sizes a module's code takes from one attribute.

    Two dims of one tensor, as groups of heads and heads of a group, are two numbers, though they
    may be equal.
    """
    for path, dims in sizes.items():
        values = _numbers(model, path)
        by_kind: dict[tuple[int, str], list[list[Layout]]] = defaultdict(list)
        for dim in dims:
            kind = _kind_of(plan, dim)
            if kind is not None and dim.size in values:
                groups = by_kind[dim.size, kind]
                free = (group for group in groups if beside[dim].isdisjoint(group))
                if (group := next(free, None)) is None:
                    groups.append(group := [])
                group.append(dim)
        every = chain.from_iterable(by_kind.values())
        yield from (tuple(same) for same in every if len(same) > 1)


def _beside(analysis: Analysis) -> Mapping[Layout, set[Layout]]:
    """Return for each dim with an axis the others of the tensors that it is a dim of."""
    found: dict[Layout, set[Layout]] = defaultdict(set)
    for made in set(analysis.layouts.values()):
        for dims in made if made and isinstance(made[0], tuple) else (made,):
            with_axes = {dim for dim in dims if axes_of(dim)}
            for dim in with_axes:
                found[dim] |= with_axes - {dim}
    return found


def _equal_pieces(analysis: Analysis) -> Iterator[Layouts]:
    """Yield the dims of the pieces where code splits a dim into pieces of one size."""
    for node in analysis.captured.graph.nodes:
        pieces = analysis.layouts.get(node.name, ())
        if operator_name(node.target) not in ("aten.chunk", "aten.split") or not pieces:
            continue
        dim = int(argument(node, 2, "dim", 0)) % len(pieces[0])
        dims = tuple(dict.fromkeys(piece[dim] for piece in pieces))
        if len(dims) > 1 and all(each.size == dims[0].size for each in dims):
            yield dims


def _kind_of(plan: Plan, dim: Layout) -> str | None:
    """Return the kind of a dim's concatenated axes; None without a common kind."""
    if not isinstance(dim, Slots | Cat) or not all(isinstance(p, Slots) for p in _parts(dim)):
        return None
    kinds = {plan.axes[slots.axis].kind for slots in leaves(dim)}
    return kinds.pop() if len(kinds) == 1 else None


def _parts(dim: Layout) -> Layouts:
    return dim.parts if isinstance(dim, Cat) else (dim,)
