"""What the modules' own code says of sizes: what it has to know to run on in a cut model.

A captured graph has its numbers in plain sight and they are rewritten there. A module's forward
takes them from the module's attributes, or from nowhere; and it averages over as many values as it
is given. Both are noted here, by module, from the nodes that its forward made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.fx import Node

from l0prune.capture.provenance import module_of
from l0prune.infer.build import Analysis
from l0prune.infer.nodes import SIZED, SLICES, SPLITS, argument, operator_name, shape_of
from l0prune.infer.rules.reduction import TELLING, reduced_dims
from l0prune.plan.code import Code
from l0prune.plan.layout import Cat, Layout, Layouts, Slots, axes_of, leaves, size_of
from l0prune.plan.plan import Plan

_NORMS = ("aten.layer_norm", "aten.group_norm", "aten.rms_norm")


def with_code(analysis: Analysis, model: nn.Module) -> Analysis:
    """The analysis with what the model's code says; its plan keeps alike what has one number."""
    code = Code(sizes=_sizes(analysis), averages=_averages(analysis, model))
    plan = replace(analysis.plan, code=code)
    return replace(analysis, plan=replace(plan, alike=tuple(_alike(plan, model))))


# --- numbers --------------------------------------------------------------------------------


def _sizes(analysis: Analysis) -> dict[str, Layouts]:
    """By module, the dims whose sizes its code gives as numbers, where one of them has an axis.

    Beside those the ones that have no axis but the same size: the number may be theirs.
    """
    found: dict[str, dict[Layout, None]] = defaultdict(dict)
    for node in analysis.captured.graph.nodes:
        if node.op == "call_function" and node.name in analysis.layouts:
            for layout in _given(node, analysis.layouts[node.name]):
                found[_path(node)][layout] = None
    result = {}
    for path, dims in found.items():
        cut = {size_of(dim) for dim in dims if axes_of(dim)}
        told = tuple(dim for dim in dims if size_of(dim) in cut)
        if told:
            result[path] = told
    return result


def _given(node: Node, layouts: tuple) -> Iterator[Layout]:
    """The dims of a call's output whose size is a number among its arguments."""
    name = operator_name(node.target)
    if name in SIZED:
        sizes = zip(node.args[SIZED[name]], layouts, strict=False)  # type: ignore[arg-type]
    elif name == "aten.unflatten":
        dim = int(node.args[1]) % (len(layouts) - len(node.args[2]) + 1)  # type: ignore[arg-type]
        sizes = zip(node.args[2], layouts[dim:], strict=False)  # type: ignore[arg-type]
    elif name in SPLITS and name != "aten.chunk":
        dim = int(argument(node, 2, "dim", 0)) % len(layouts[0])
        given = node.args[1]
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
    paths = {
        _path(node)
        for node in analysis.captured.graph.nodes
        if node.op == "call_function" and any(map(axes_of, _averaged(node, analysis)))
    }
    regions: dict[str, list[Node]] = {path: [] for path in sorted(paths)}
    for node in analysis.captured.graph.nodes:
        if node.op == "call_function" and _path(node) in regions:
            regions[_path(node)].append(node)
    found = {}
    for path, nodes in regions.items():
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


def _alike(plan: Plan, model: nn.Module) -> Iterator[Layouts]:
    """Dims that one attribute of a module stands for, as its code gives the sizes of all."""
    for path, dims in plan.code.sizes.items():
        values = [value for value in vars(model.get_submodule(path)).values() if type(value) is int]
        by_kind: dict[tuple[int, str], list[Layout]] = defaultdict(list)
        for dim in dims:
            kind = kind_of(plan, dim)
            if kind is not None and size_of(dim) in values:
                by_kind[size_of(dim), kind].append(dim)
        yield from (tuple(same) for same in by_kind.values() if len(same) > 1)


def kind_of(plan: Plan, dim: Layout) -> str | None:
    """The kind of the axes that a dim is made of, side by side; None where that is not one."""
    if not isinstance(dim, Slots | Cat) or not all(isinstance(p, Slots) for p in _parts(dim)):
        return None
    kinds = {plan.axes[slots.axis].kind for slots in leaves(dim)}
    return kinds.pop() if len(kinds) == 1 else None


def _parts(dim: Layout) -> Layouts:
    return dim.parts if isinstance(dim, Cat) else (dim,)
