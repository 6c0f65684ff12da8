"""What the modules' own code says of sizes: what it has to know to run on in a cut model.

A captured graph has its numbers in plain sight and they are rewritten there. A module's forward
takes them from the module's attributes, or from nowhere; and it averages over as many values as it
is given. Both are noted here, by module, from the nodes that its forward made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from torch import nn
from torch.fx import Node

from l0prune.capture.provenance import module_of
from l0prune.infer.build import Analysis
from l0prune.infer.nodes import SIZED, SLICES, SPLITS, argument, operator_name, shape_of
from l0prune.infer.query_scale import query_factors
from l0prune.infer.rules.reduction import TELLING, reduced_dims
from l0prune.plan.code import Code, ReusedSize
from l0prune.plan.layout import Cat, Layout, Layouts, Slots, axes_of, leaves, size_of
from l0prune.plan.plan import Plan

_NORMS = ("aten.layer_norm", "aten.group_norm", "aten.rms_norm")


def with_code(analysis: Analysis, model: nn.Module) -> Analysis:
    """The analysis with what the model's code says; its plan keeps alike what has one number."""
    plan, every = analysis.plan, _sizes(analysis)
    alike = (*_equal_pieces(analysis), *_of_one_number(plan, model, every))
    averages, queries = _averages(analysis, model), tuple(query_factors(analysis))
    reused = tuple(_reused(analysis, model, every))
    code = Code(_not_received(analysis, every), averages, queries, reused)
    return replace(analysis, plan=replace(plan, code=code, alike=tuple(dict.fromkeys(alike))))


# --- numbers --------------------------------------------------------------------------------


def _sizes(analysis: Analysis) -> dict[str, Layouts]:
    """By module, the dims whose sizes its code gives as numbers, where one of them has an axis.

    Beside those the ones that have no axis but the same size: the number may be theirs.
    """
    result = {}
    for path, nodes in _regions(analysis).items():
        dims = list(dict.fromkeys(chain.from_iterable(_given(n, analysis) for n in nodes)))
        cut = {size_of(dim) for dim in dims if axes_of(dim)}
        if cut:
            result[path] = tuple(dim for dim in dims if size_of(dim) in cut)
    return result


def _not_received(analysis: Analysis, sizes: Mapping[str, Layouts]) -> dict[str, Layouts]:
    """Without dims that an input of the module has: their size was probably read off that.

    They stay where no other dim has that size.
    """
    result = {}
    for path, dims in sizes.items():
        received = _received(analysis, path)
        other = {size_of(dim) for dim in dims if dim not in received}
        result[path] = tuple(
            dim
            for dim in dims
            if dim not in received or not axes_of(dim) or size_of(dim) not in other
        )
    return result


def _reused(
    analysis: Analysis, model: nn.Module, sizes: Mapping[str, Layouts]
) -> Iterator[ReusedSize]:
    """Sizes of inputs that the code of a module, which has no such number, gives to other dims."""
    for path, dims in sizes.items():
        values = [value for value in vars(model.get_submodule(path)).values() if type(value) is int]
        received = _received(analysis, path)
        for used in dims:
            size = size_of(used)
            if size in values or used in received or not axes_of(used):
                continue
            others = [dim for dim in received if axes_of(dim) and size_of(dim) == size]
            yield from (ReusedSize(path, read, used) for read in others[:1])


def _received(analysis: Analysis, path: str) -> dict[Layout, None]:
    """The dims of what a module is given, also of what its submodules alone look at."""
    below = [
        node
        for node in analysis.captured.graph.nodes
        if node.op == "call_function" and f"{_path(node)}.".startswith(f"{path}." if path else "")
    ]
    return {dim: None for each in _inputs(analysis, below) for dim in each}


def _regions(analysis: Analysis) -> dict[str, list[Node]]:
    """By path, the calls that the forward of each module makes by itself."""
    regions: dict[str, list[Node]] = defaultdict(list)
    for node in analysis.captured.graph.nodes:
        if node.op == "call_function":
            regions[_path(node)].append(node)
    return regions


def _given(node: Node, analysis: Analysis) -> Iterator[Layout]:
    """The dims of a call's output whose size is a number among its arguments."""
    name, layouts = operator_name(node.target), analysis.layouts.get(node.name, ())
    if not layouts:
        return
    if name in SIZED:
        sizes = zip(node.args[SIZED[name]], layouts, strict=False)  # type: ignore[arg-type]
    elif name == "aten.unflatten":
        dim = int(node.args[1]) % (len(layouts) - len(node.args[2]) + 1)  # type: ignore[arg-type]
        sizes = zip(node.args[2], layouts[dim:], strict=False)  # type: ignore[arg-type]
    elif name in SPLITS:
        dim = int(argument(node, 2, "dim", 0)) % len(layouts[0])
        given = size_of(layouts[0][dim]) if name == "aten.chunk" else node.args[1]
        each = given if isinstance(given, list | tuple) else [given] * len(layouts)
        sizes = zip(each, (piece[dim] for piece in layouts), strict=False)
    elif name in SLICES and not argument(node, 2, "start", 0):
        dim = int(argument(node, 1, "dim", 0)) % len(layouts)
        sizes = zip([argument(node, 3, "end")], [layouts[dim]], strict=True)
    else:
        return
    yield from (layout for size, layout in sizes if type(size) is int and size == size_of(layout))


def _path(node: Node) -> str:
    """The module whose forward made the node, also where it is called several times."""
    return module_of(node).partition("@")[0]


# --- averages -------------------------------------------------------------------------------


def _averages(analysis: Analysis, model: nn.Module) -> dict[str, Layouts]:
    """By module that averages over an axis and holds no other, the dims of its only input."""
    found = {}
    for path, nodes in _regions(analysis).items():
        if any(axes_of(dim) for node in nodes for dim in _averaged(node, analysis)):
            inputs = set(_inputs(analysis, nodes))
            if len(inputs) == 1 and not any(True for _ in model.get_submodule(path).children()):
                found[path] = inputs.pop()
    return found


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
    """The dims of each tensor that these nodes take from elsewhere."""
    own = set(region)
    for node in dict.fromkeys(each for own_node in region for each in own_node.all_input_nodes):
        is_stored = node.name in analysis.captured.names
        if node not in own and not is_stored and shape_of(node) is not None:
            yield analysis.layouts[node.name]


# --- what has one number --------------------------------------------------------------------


def _of_one_number(plan: Plan, model: nn.Module, sizes: Mapping[str, Layouts]) -> Iterator[Layouts]:
    """Dims that one attribute of a module stands for, as its code gives the sizes of all."""
    for path, dims in sizes.items():
        values = [value for value in vars(model.get_submodule(path)).values() if type(value) is int]
        by_kind: dict[tuple[int, str], list[Layout]] = defaultdict(list)
        for dim in dims:
            kind = _kind_of(plan, dim)
            if kind is not None and size_of(dim) in values:
                by_kind[size_of(dim), kind].append(dim)
        yield from (tuple(same) for same in by_kind.values() if len(same) > 1)


def _equal_pieces(analysis: Analysis) -> Iterator[Layouts]:
    """Dims that code splits into pieces of one size."""
    for node in analysis.captured.graph.nodes:
        if node.op == "call_function" and operator_name(node.target) in (
            "aten.chunk",
            "aten.split",
        ):
            pieces = analysis.layouts.get(node.name, ())
            dim = int(argument(node, 2, "dim", 0)) % len(pieces[0]) if pieces else 0
            dims = tuple(dict.fromkeys(piece[dim] for piece in pieces))
            if len(dims) > 1 and all(size_of(each) == size_of(dims[0]) for each in dims):
                yield dims


def _kind_of(plan: Plan, dim: Layout) -> str | None:
    """The kind of the axes that a dim is made of, side by side; None where that is not one."""
    if not isinstance(dim, Slots | Cat) or not all(isinstance(p, Slots) for p in _parts(dim)):
        return None
    kinds = {plan.axes[slots.axis].kind for slots in leaves(dim)}
    return kinds.pop() if len(kinds) == 1 else None


def _parts(dim: Layout) -> Layouts:
    return dim.parts if isinstance(dim, Cat) else (dim,)
