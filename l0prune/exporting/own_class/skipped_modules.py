"""Modules that a cut model of the user's class skips because they served removed branches only.

A block whose branches are all removed returns its input. Otherwise the last modules of a branch
return zeros (in a concatenation an empty tensor), and the modules before them return their input.
Modules of a list that store their index (a decoder layer's position in a cache) are renumbered from
0 if others are skipped. The comparison of the class shows whether the result is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from l0prune.capture.compat import has_pre_hooks
from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import Call, record, tensors_in
from l0prune.capture.provenance import is_within, modules_of, within, without_call
from l0prune.exporting.own_class.choice import OwnClass
from l0prune.exporting.own_class.layers import Layer
from l0prune.exporting.own_class.sizes import Changes, changed_attributes, joined
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.files.cut_layers import SkippedModule, Window, sizes_after
from l0prune.infer.dataflow import Ending
from l0prune.infer.nodes import (
    SLICES,
    SPLITS,
    argument,
    arguments,
    has_tensor,
    is_writer,
    operator_name,
    shape_of,
)
from l0prune.infer.parts import Part
from l0prune.plan.layout import axes_of, leaves
from l0prune.plan.plan import Plan
from l0prune.plan.switches import dead_parameters


@dataclass(frozen=True)
class Called:
    """Record of one call of a module.

    Attributes:
        at: position of the input that the module can return unchanged: the first one of the
            output's shape, else the first one.
        name: of that input.
        depth: number of lists around the tensor in that input.
        results: number of values in the returned tuple, 0 if the module returns a tensor.
        shape: of the (first) output; None if no input has this shape.
        takes_tensor: whether that input is a tensor.
        is_alone: whether the module takes no other input, and this one by position.
        passed: further results that are inputs: number of the result, position and name of the
            input. Blocks hand on so what the next ones take, such as the biases of positions.
    """

    at: int
    name: str
    depth: int
    results: int
    shape: tuple[int, ...] | None
    takes_tensor: bool
    is_alone: bool
    passed: tuple[tuple[int, int, str], ...]


def called(plain: nn.Module, paths: Iterable[str], part: Part) -> dict[str, Called]:
    """Return, by path, call records of the modules that can be skipped.

    Modules that return neither a tensor nor a tuple are left out, and modules without an input to
    return: without tensors, or, if they have no parameters and so cost little, without float ones.
    """
    names = {path.removeprefix(f"{part.path}."): path for path in paths}
    with torch.no_grad():
        calls = record(copied(plain.get_submodule(part.path)), list(names), part.example)
    by_keyword = {call.path for call in calls if call.inputs[1]}
    return {
        names[call.path]: _of(call, module.forward, call.path not in by_keyword)
        for call in calls
        if isinstance(call.output, Tensor) or type(call.output) is tuple
        if _is_given_some(call, module := plain.get_submodule(names[call.path]))
    }


def _is_given_some(call: Call, module: nn.Module) -> bool:
    tensors = tensors_in(call.inputs)
    if any(True for _ in module.parameters()):
        return bool(tensors)
    return any(tensor.is_floating_point() for tensor in tensors)


def _of(call: Call, forward: Callable[..., Any], is_by_position: bool) -> Called:
    results = 0 if isinstance(call.output, Tensor) else len(call.output)
    shape = _shape(call.output[0] if results else call.output)
    inputs = list(_inputs(call, forward))
    found = next((each for each in inputs if shape and _shape(each[2]) == shape), None)
    at, name, given = found or inputs[0]
    takes_tensor, depth = isinstance(given, Tensor), 0
    while isinstance(given, list | tuple) and given:
        given, depth = given[0], depth + 1
    takes = [each.kind for each in signature(forward).parameters.values()]
    is_alone = is_by_position and takes == [Parameter.POSITIONAL_OR_KEYWORD]
    known = None if found is None else shape
    passed = _passed(call.output[1:], inputs) if results else ()
    return Called(at, name, depth, results, known, takes_tensor, is_alone, passed)


def _passed(
    results: Sequence[Any], inputs: Sequence[tuple[int, str, Any]]
) -> tuple[tuple[int, int, str], ...]:
    """Return which further results are inputs, at their positions that no other input shares."""
    places = [at for at, *_ in inputs]
    alone = [each for each in inputs if places.count(each[0]) == 1 and isinstance(each[2], Tensor)]
    found = []
    for number, result in enumerate(results, 1):
        if isinstance(result, Tensor):
            same = ((at, name) for at, name, given in alone if _are_equal(given, result))
            found += [(number, *place) for place in list(same)[:1]]
    return tuple(found)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bool(torch.equal(one, other))


def _inputs(call: Call, forward: Callable[..., Any]) -> Iterator[tuple[int, str, Any]]:
    """Yield the position, name and value of each input, those given by position first."""
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(forward).parameters.values()
    names = [each.name for each in parameters if each.kind in by_position]
    args, kwargs = call.inputs
    for at, value in enumerate(args):
        yield at, names[at] if at < len(names) else f"_{at}", value
    for name, value in kwargs.items():
        yield names.index(name) if name in names else max(len(names), len(args)), name, value


def _shape(value: Any) -> tuple[int, ...] | None:
    # Nested tensors (torch's packing of padded sequences) have no shape.
    return tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else None


_POOLS = tuple(f"aten.{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3))
_CONVOLUTIONS = (*(f"aten.conv{n}d" for n in (1, 2, 3)), "aten.convolution")
_MOST = 8  # parallel paths kept per node: those of one block lead to the same sizes


def windows_to(end: Node, start: Node, between: Set[Node]) -> list[tuple[Window, ...]]:
    """Return window sequences (convolutions, pools) on up to 8 paths from ``start`` to ``end``.

    Parallel paths give separate entries. So does a mean over all positions that multiplies the
    other path: no sizes are left on it.
    """
    ways: dict[Node, list[tuple[Window, ...]]] = {start: [()]}
    for node in sorted(between):
        own = _windows(node)
        before = [way for each in node.all_input_nodes for way in ways.get(each, ())]
        if own is not None and before:
            ways[node] = list(dict.fromkeys((*way, *own) for way in before))[:_MOST]
    return ways.get(end, [])


def _windows(node: Node) -> tuple[Window, ...] | None:
    """Return the window of a node if it changes spatial sizes, else an empty tuple.

    None where sizes do not follow from kernel, stride, padding and dilation alone.
    """
    name = operator_name(node.target)
    if name not in _CONVOLUTIONS + _POOLS:
        return ()
    given = arguments(node)
    if given.get("transposed") or given.get("ceil_mode"):
        return None
    window = _window(given, name in _CONVOLUTIONS)
    stays = all(s == 1 and 2 * p == d * (k - 1) for k, s, p, d in zip(*window, strict=True))
    return () if stays else (window,)


def _window(given: dict[str, Any], is_convolution: bool) -> Window:
    kernel = (shape_of(given["weight"]) or [])[2:] if is_convolution else given["kernel_size"]
    dims = len(kernel)
    stride, dilation = _each(given["stride"] or kernel, dims), _each(given.get("dilation", 1), dims)
    padding = given["padding"]
    if padding == "same":  # sizes are unchanged: torch allows no stride here
        kernel, padding = (1,) * dims, 0
    return (tuple(kernel), stride, _each(0 if padding == "valid" else padding, dims), dilation)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


@dataclass(frozen=True)
class Channels:
    """Number of channels before the cut, and of those left."""

    before: int
    left: int


def channels_of(part: Part, chosen: KeptSlots, join: Node) -> Channels | None:
    """Return the channels of a sum's result; None unless exactly one of its dims has slots."""
    layouts = part.analysis.layouts.get(join.name, ())
    found = [layout for layout in layouts if any(True for _ in leaves(layout))]
    if len(found) != 1:
        return None
    (layout,) = found
    return Channels(layout.size, int(chosen.plan.mask(layout, chosen.kept).sum()))


def instead(
    ending: Ending,
    starts: Set[Node],
    before: Set[Node],
    stream: Channels | None,
    kept: Sequence[int] | None,
) -> dict[str, Any]:
    """Return the ``SkippedModule`` settings of a branch's last module, given the branch's input.

    ``y += x`` needs zeros of the sum's shape; ``y + x`` also works with a single zero, which is
    used where the derivation of that shape from the input's is unknown. Code that merges windows
    needs zeros of the shape within windows.

    Args:
        ending: where the branch ends.
        starts: nodes outside the branch that feed the module's part of it.
        before: removed nodes that the branch is computed from.
        stream: channels of the stream that the branch is added to.
        kept: shape that the last module returns, if all of the branch's modules keep an input's.
    """
    if ending.axes:
        return {"gives": "nothing"}
    if kept is not None:
        return _zeros(*_dim_and_channels(kept, kept, stream))
    wanted, unknown = shape_of(ending.joins[0]) or [], {"gives": "zero"}
    for given in sorted(starts):
        given_sizes = shape_of(given)
        if given_sizes is None or len(given_sizes) != len(wanted):
            continue
        for windows in windows_to(ending.end, given, before):
            sizes = sizes_after(tuple(given_sizes), windows)
            dim, channels = _dim_and_channels(sizes, wanted, stream)
            if all(size == wanted[at] or (at == dim and dim) for at, size in enumerate(sizes)):
                return {**_zeros(dim, channels), "windows": windows}
    return unknown


def _zeros(dim: int, channels: int) -> dict[str, Any]:
    return {"gives": "zeros", "dim": dim, "channels": channels}


def _dim_and_channels(
    sizes: Sequence[int], wanted: Sequence[int], stream: Channels | None
) -> tuple[int, int]:
    """Return a branch's channel dim and channel count; 0, 0 to keep the sizes of the input.

    Args:
        sizes: of the branch's input, after its known windows.
        wanted: sizes of the branch's output before the cut.
        stream: channels of the stream that the branch is added to.
    """
    others = [dim for dim in range(1, len(wanted)) if sizes[dim] != wanted[dim]]
    if stream is None:
        return (others[0], wanted[others[0]]) if len(others) == 1 else (0, 0)
    fitting = [dim for dim in range(1, len(wanted)) if wanted[dim] == stream.before]
    fitting = [dim for dim in fitting if dim in others] or fitting
    return (fitting[0], stream.left) if len(fitting) == 1 else (0, 0)


_PLAIN = (int, float, bool, str, type(None))

Place = tuple[str, str]  # path of a module, and name of an attribute


def renumbered(plain: nn.Module, skipped: Collection[str]) -> Changes:
    """Return new indices for modules that store their index in a list, without the skipped ones.

    Indices are exchanged only among modules of one class with equal settings: a cache may have
    entries of several kinds.
    """
    found: Changes = defaultdict(dict)
    for name, alike in _alike(plain):
        left = [
            number
            for number, path in sorted(alike.items())
            if not any(is_within(path, each) for each in skipped)
        ]
        for new, old in zip(sorted(alike), left, strict=False):
            if new != old:
                found[alike[old]][name] = new
    return dict(found)


def numbers_of(plain: nn.Module) -> set[Place]:
    """Return the attributes in which modules store their index in a list."""
    return {(path, name) for name, alike in _alike(plain) for path in alike.values()}


def _alike(plain: nn.Module) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield an index attribute, and by index the paths of modules equal in all other settings."""
    for path, entries in plain.named_modules():
        if not isinstance(entries, nn.ModuleList):
            continue
        places = _numbers(entries)
        groups: dict[tuple[Any, ...], dict[int, str]] = defaultdict(dict)
        for number, entry in enumerate(entries):
            for inner, module in entry.named_modules():
                names = {name for at, name in places if at == inner}
                for name in names & vars(module).keys():
                    key = (inner, name, type(module), *_settings(module, names))
                    groups[key][number] = within(within(path, str(number)), inner)
        for (_, name, *_), alike in groups.items():
            yield name, alike


def _numbers(entries: nn.ModuleList) -> list[Place]:
    """Return the attributes that equal the entry's index in every entry of the list that has them.

    Paths are relative to the entry.
    """
    values: dict[Place, list[bool]] = defaultdict(list)
    for number, entry in enumerate(entries):
        for inner, module in entry.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    values[inner, name].append(value == number)
    return [place for place, found in values.items() if len(found) > 1 and all(found)]


def _settings(module: nn.Module, apart_from: Collection[str]) -> list[tuple[str, Any]]:
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if type(value) in _PLAIN and name not in apart_from
    )


_ACTIVATIONS = ("aten.relu", "aten.relu_")  # idempotent
_CASTS = ("aten.to", "aten.contiguous")  # return their input if it has the right form
_RESHAPES = frozenset(("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten"))


def ways_around(
    plain: nn.Module, parts: Sequence[Part], by_part: Mapping[str, KeptSlots], gone: Collection[str]
) -> Iterator[dict[str, Layer]]:
    """Yield mappings from path to replacement layer, the one with the least computation first."""
    if not gone:
        return
    found = [_Gone.of(plain, part, by_part[part.path], gone) for part in parts]
    last: dict[str, Layer] | None = None
    for whole_blocks in (True, False):
        ways = [_way(plain, each, whole_blocks) for each in found]
        way = {path: layer for of_part in ways for path, layer in of_part.items()}
        # Pre-hooks would run on empty tensors. The old weight norm's does, and torch ends the
        # process when it divides an empty tensor by its size.
        if way != last and not any(map(has_pre_hooks, map(plain.get_submodule, way))):
            yield way
        last = way


@dataclass(frozen=True)
class _Gone:
    """Removed branches of one captured part of a model, with their nodes and modules.

    Attributes:
        part: as it was captured.
        chosen: its slots that stay.
        endings: of the removed branches.
        dead: nodes that only these branches need.
        joins: the sums that lose an operand.
        modules: by path, the needed tensors that each module computes.
    """

    part: Part
    chosen: KeptSlots
    endings: list[Ending]
    dead: Set[Node]
    joins: Set[Node]
    modules: dict[str, set[Node]]

    @staticmethod
    def of(plain: nn.Module, part: Part, chosen: KeptSlots, gone: Collection[str]) -> _Gone:
        branches = part.analysis.branches
        endings = [each for each in branches.endings if each.name in gone]
        joins = {join for ending in endings for join in ending.joins if ending.tensors}
        modules = _nodes_by_module(plain, part)
        return _Gone(part, chosen, endings, branches.dead(gone), joins, modules)

    def whole_blocks(self) -> list[str]:
        """Return paths of modules that compute only removed branches and their sums."""
        nothing = {*self.dead, *self.joins, *_repeated(self.joins)}
        return _outermost(
            path
            for path, of in self.modules.items()
            if of & self.joins and _keeps_shape(of, self.dead)
            if all(node in nothing or _is_handed_on(node) for node in of)
        )

    def inner(self) -> list[str]:
        """Return paths of modules that compute only removed branches."""
        return _outermost(path for path, of in self.modules.items() if of <= self.dead)

    def is_written_between(self, inner: Iterable[str]) -> bool:
        """Return whether removed branches write in place outside of the ``inner`` modules."""
        skipped = {node for path in inner for node in self.modules[path]}
        return any(is_writer(node) for node in self.dead - skipped)


def _way(plain: nn.Module, gone: _Gone, whole_blocks: bool) -> dict[str, Layer]:
    """Return the replacement layers of one part's modules, by path."""
    blocks = gone.whole_blocks() if whole_blocks else []
    inner = [p for p in gone.inner() if not any(is_within(p, block) for block in blocks)]
    gives: dict[str, dict[str, Any]] = {path: {"gives": "input"} for path in (*blocks, *inner)}
    calls = called(plain, list(gives), gone.part)
    if gone.is_written_between(
        (*blocks, *inner)
    ):  # into values of the stream or of another branch that backward needs
        fresh = [path for path in inner if path in calls and calls[path].takes_tensor]
        gives |= {path: {"gives": "zeros"} for path in fresh}
    for ending in gone.endings:
        before = _before({ending.end}, gone.dead)
        mine = {p: gone.modules[p] & before for p in inner if gone.modules[p] & before}
        stream = channels_of(gone.part, gone.chosen, ending.joins[0]) if mine else None
        for last, made_of in _last_ones(mine, gone.dead).items():
            makers = [path for path in mine if mine[path] & made_of]
            shapes = [calls[path].shape if path in calls else None for path in makers]
            kept = calls[last].shape if None not in shapes else None
            starts = {each for node in made_of for each in node.all_input_nodes} - before
            gives[last] = instead(ending, starts, before, stream, kept)
    return {path: _layer(what, calls[path]) for path, what in gives.items() if path in calls}


def _layer(gives: Mapping[str, Any], call: Called) -> Layer:
    """Return the layer that gives this: torch's own where it gives its one input back.

    All attributes of a ``SkippedModule`` are set: the module may use the same names itself.
    """
    if gives["gives"] == "input" and call.is_alone and not call.results:
        return Layer(kind=nn.Identity.__name__)
    same = {"windows": (), "dim": 0, "channels": 0}
    taken = {"at": call.at, "name": call.name, "depth": call.depth}
    taken |= {"results": call.results, "passed": call.passed}
    return Layer({**same, **gives, **taken}, kind=SkippedModule.__name__)


def _before(ends: Set[Node], dead: Set[Node]) -> set[Node]:
    """Return the removed nodes that ``ends`` depend on, including ``ends``."""
    found, pending = set(ends), [*ends]
    while pending:
        new = {each for each in pending.pop().all_input_nodes if each in dead} - found
        found |= new
        pending += new
    return found


def _last_ones(mine: Mapping[str, Set[Node]], dead: Set[Node]) -> dict[str, set[Node]]:
    """Return the last modules of a branch, each with the removed nodes that it depends on.
    There are several where a branch is the sum of parallel paths.
    """
    made_of = {path: _before(nodes, dead) for path, nodes in mine.items()}

    def feeds(path: str, other: str) -> bool:
        return bool(mine[path] & made_of[other])

    return {
        path: nodes
        for path, nodes in made_of.items()
        if all(feeds(other, path) for other in mine if feeds(path, other))
    }


def _nodes_by_module(plain: nn.Module, part: Part) -> dict[str, set[Node]]:
    """Return, by module path, the needed tensors that the module computes, over all of its calls.

    Only tensors count: a number that two modules derive from sizes is a node of the first alone.
    """
    captured, needs = part.analysis.captured, part.analysis.branches.needs
    paths = {path for path, _ in plain.named_modules(remove_duplicate=False)}
    paths -= {"", captured.path}
    found: dict[str, set[Node]] = defaultdict(set)
    for node in captured.graph.nodes:
        counts = node.op == "call_function" and bool(needs[node]) and has_tensor(node)
        for name in modules_of(node) if counts else ():
            path = without_call(name)
            if path in paths:
                found[path].add(node)
    return found


def _repeated(joins: Iterable[Node]) -> Iterator[Node]:
    """Yield relus after these sums, which are no-ops where the other operand passed one already."""
    for join in joins:
        for user in join.users:
            if operator_name(user.target) in _ACTIVATIONS:
                yield user


def _keeps_shape(nodes: Set[Node], dead: Set[Node]) -> bool:
    """Check that the module's outputs, without ``dead`` ones, have the shape of some input."""
    taken = {each for node in nodes for each in node.all_input_nodes} - nodes
    shapes = [shape_of(each) for each in taken]
    given = (node for node in nodes - dead if not node.users.keys() <= nodes)
    return all(shape_of(node) in shapes for node in given)


def _is_handed_on(node: Node) -> bool:
    """Check for a node that returns its input: a cast without effect, or a reshape.

    If the module's output has its input's shape, its reshapes cancel each other.
    """
    if operator_name(node.target) in _RESHAPES:
        return True
    if operator_name(node.target) not in _CASTS:
        return False
    given, got = (each.meta["val"] for each in (node.all_input_nodes[0], node))
    return (given.dtype, given.device, given.stride()) == (got.dtype, got.device, got.stride())


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not inside another of the paths."""
    found = sorted(paths, key=len)
    return [p for i, p in enumerate(found) if not any(is_within(p, o) for o in found[:i])]


def around(
    own: OwnClass,
    way: Mapping[str, Layer],
    plan: Plan,
    parts: Sequence[Part],
    *,
    drops: bool = True,
) -> OwnClass:
    """Return the class with the modules of ``way`` skipped and their tensors emptied.

    With ``drops``, parameters of removed branches that other modules' code reads are dropped;
    otherwise they stay, at zero. ``parts`` are those that were captured.
    """

    def is_skipped(name: str) -> bool:
        return any(is_within(name, path) for path in way)

    dead = dead_parameters(plan, [branch.name for branch in own.gone])
    parameters = {name for name, _ in own.plain.named_parameters(remove_duplicate=False)}
    tensors, emptied = dict(own.tensors), {}
    dropped = {
        name: _fewest_sizes(name, own.plain.get_parameter(name).shape, plan, parts)
        for name in dead
        if drops and not is_skipped(name)
    }
    for name, old in own.plain.state_dict().items():
        first = plan.aliases.get(name, name)
        if is_skipped(name) and old.ndim and (name not in parameters or first in dead):
            tensors[first] = emptied[name] = torch.empty([0] * old.ndim, dtype=torch.float64)
    left = {name for name, tensor in tensors.items() if tensor.numel()} - dropped.keys()
    scales = {name: by for name, by in own.scales.items() if name in left}
    others = {path: layer for path, layer in own.layers.items() if not is_skipped(path)}
    # No forward runs inside a skipped module; other packages (LoRA) read the sizes of its layers.
    sizes = changed_attributes(own.plain, emptied, {})
    inside = {path: new for path, new in sizes.items() if path not in way}
    numbers = joined(renumbered(own.plain, way), inside)
    candidates = (
        {path: new for path, new in changes.items() if not is_skipped(path)}
        for changes in own.candidates
    )
    return replace(
        own,
        tensors=tensors,
        candidates=tuple(joined(changes, numbers) for changes in candidates),
        layers={**others, **way},
        scales=scales,
        gone=(),
        unread={path: new for path, new in own.unread.items() if not is_skipped(path)},
        dropped=dropped,
    )


# Operators that read places along a dim by their numbers, with the position of that dim.
_BY_NUMBER = {
    **dict.fromkeys((*SLICES, "aten.select", "aten.unbind", "aten.index_select"), 1),
    **dict.fromkeys(SPLITS, 2),
}


def _fewest_sizes(name: str, shape: Sequence[int], plan: Plan, parts: Sequence[Part]) -> list[int]:
    """Return the sizes of zeros in place of a parameter: 1, or all where code reads by number."""
    sizes = [1] * len(shape)
    for captured in (part.analysis.captured for part in parts):
        readers = (
            user
            for node in captured.graph.find_nodes(op="placeholder")
            if captured.names.get(node.name) == name
            for user in node.users
        )
        for user in readers:
            position = _BY_NUMBER.get(operator_name(user.target))
            if position is not None:
                dim = argument(user, position, "dim", 0) % len(shape)
                sizes[dim] = 1 if axes_of(plan.tensors[name][dim]) else shape[dim]
    return sizes
