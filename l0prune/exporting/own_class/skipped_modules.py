"""Modules that a cut model of its own class skips, since only branches needed them that are gone.

A block of which all branches are gone gives back what it takes; else the last modules of a branch
give zeros, or nothing where it was put beside others, and those before it hand their input on.
Modules of a list that remember their number (a decoder's layers find their place in a cache by it)
take the first numbers if others are skipped. The comparison of the class shows whether that is
right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
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
from l0prune.exporting.own_class.sizes import Changes, joined
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.files.cut_layers import SkippedModule, Window, sizes_after
from l0prune.infer.dataflow import Ending
from l0prune.infer.nodes import arguments, has_tensor, is_writer, operator_name, shape_of
from l0prune.infer.parts import Part
from l0prune.plan.layout import leaves
from l0prune.plan.plan import Plan
from l0prune.plan.switches import dead_parameters


@dataclass(frozen=True)
class Called:
    """Record of how a module is called.

    Attributes:
        at: which of its inputs it can give back, those by position first: the one that is shaped
            as what it returns, a class token, say, beside all others; else the first.
        results: how many it returns in a tuple, 0 if it returns a tensor.
        shape: of what it returns; None if none of its inputs has that.
        takes_tensor: whether the input that it can give back is one.
    """

    at: int
    results: int
    shape: tuple[int, ...] | None
    takes_tensor: bool


def called(plain: nn.Module, paths: Iterable[str], part: Part) -> dict[str, Called]:
    """Return, by path, how modules are called that have something to give back.

    Left out are those that return neither a tensor nor a tuple, and those that are given nothing to
    pass on: no tensor at all, or, where they hold no parameters and so cost little, a mask alone.
    """
    names = {path.removeprefix(f"{part.path}."): path for path in paths}
    with torch.no_grad():
        calls = record(copied(plain.get_submodule(part.path)), list(names), part.example)
    return {
        names[call.path]: _of(call)
        for call in calls
        if isinstance(call.output, Tensor) or type(call.output) is tuple
        if _is_given_some(call, plain.get_submodule(names[call.path]))
    }


def _is_given_some(call: Call, module: nn.Module) -> bool:
    tensors = tensors_in(call.inputs)
    if any(True for _ in module.parameters()):
        return bool(tensors)
    return any(tensor.is_floating_point() for tensor in tensors)


def _of(call: Call) -> Called:
    results = 0 if isinstance(call.output, Tensor) else len(call.output)
    shape = _shape(call.output[0] if results else call.output)
    args, kwargs = call.inputs
    inputs = (*args, *kwargs.values())
    at = next((at for at, given in enumerate(inputs) if shape and _shape(given) == shape), None)
    is_tensor = isinstance(inputs[at or 0], Tensor)
    return Called(at or 0, results, None if at is None else shape, is_tensor)


def _shape(value: Any) -> tuple[int, ...] | None:
    # Nested tensors, which torch packs padded sequences in, have no sizes.
    return tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else None


_POOLS = tuple(f"aten.{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3))
_CONVOLUTIONS = (*(f"aten.conv{n}d" for n in (1, 2, 3)), "aten.convolution")
_MOST = 8  # ways side by side: those of one block lead to the same sizes


def windows_to(end: Node, start: Node, between: Set[Node]) -> list[tuple[Window, ...]]:
    """Return the windows by which positions of one node come to those of another: some of the ways.

    Paths side by side are ways of their own, and so is a mean over all positions that multiplies
    the others: of its sizes nothing is left.
    """
    ways: dict[Node, list[tuple[Window, ...]]] = {start: [()]}
    for node in sorted(between):
        own = _windows(node)
        before = [way for each in node.all_input_nodes for way in ways.get(each, ())]
        if own is not None and before:
            ways[node] = list(dict.fromkeys((*way, *own) for way in before))[:_MOST]
    return ways.get(end, [])


def _windows(node: Node) -> tuple[Window, ...] | None:
    """Return the one that changes the sizes of positions here, if there is one.

    None where they change in another way than by kernel, stride, padding and dilation.
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
    if padding == "same":  # sizes stay, as torch allows no stride then
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
    """Return the channels of what a sum gives; None if not exactly one of its dims may be cut."""
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
    """Return what the last module of a branch gives if it is handed what the first one took.

    ``y += x`` takes zeros of the shape that the sum has; ``y + x`` takes one zero as well, which
    stands where it is not known how that shape comes of the input's. Code that puts windows
    together takes zeros of the shape that it has in them.

    Args:
        ending: where the branch ends.
        starts: what the module's part of it is made of, from outside.
        before: what it is made of.
        stream: channels of what it is added to.
        kept: the shape that its last module returns, if all of its modules keep that of an input.
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
            sizes = sizes_after(given_sizes, windows)
            dim, channels = _dim_and_channels(sizes, wanted, stream)
            if all(size == wanted[at] or (at == dim and dim) for at, size in enumerate(sizes)):
                return {**_zeros(dim, channels), "windows": windows}
    return unknown


def _zeros(dim: int, channels: int) -> dict[str, Any]:
    return {"gives": "zeros", "dim": dim, "channels": channels}


def _dim_and_channels(
    sizes: Sequence[int], wanted: Sequence[int], stream: Channels | None
) -> tuple[int, int]:
    """Return the dim of the channels, and how many a branch has there; 0, 0 for those it is given.

    Args:
        sizes: of what it is given, as far as they are known to change.
        wanted: of what it gave, before anything was cut.
        stream: channels of what it is added to.
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
    """Return new numbers for modules that remember theirs, so that those left have the first ones.

    Numbers change places among modules of one class and the same settings only: a cache may hold
    places of several kinds.
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
    """Return the attributes by which modules remember their number."""
    return {(path, name) for name, alike in _alike(plain) for path in alike.values()}


def _alike(plain: nn.Module) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield the name of a number, and by it the paths of modules alike in all other settings."""
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
    """Return where each entry of a list, or each that has such a module, has its number.

    Paths are those inside an entry.
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


_ACTIVATIONS = ("aten.relu", "aten.relu_")  # of what is one already, they change nothing
_CASTS = ("aten.to", "aten.contiguous")  # hand on what is as it should be
_RESHAPES = frozenset(("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten"))


def ways_around(
    plain: nn.Module, parts: Sequence[Part], by_part: Mapping[str, KeptSlots], gone: Collection[str]
) -> Iterator[dict[str, Layer]]:
    """Yield what modules become, by path: the way that leaves least to compute first."""
    if not gone:
        return
    found = [_Gone.of(plain, part, by_part[part.path], gone) for part in parts]
    last: dict[str, Layer] | None = None
    for whole_blocks in (True, False):
        ways = [_way(plain, each, whole_blocks) for each in found]
        way = {path: layer for of_part in ways for path, layer in of_part.items()}
        # Hooks would run on tensors of which nothing is left. The old weight norm's does, and torch
        # ends the process when it divides nothing by its size.
        if way != last and not any(map(has_pre_hooks, map(plain.get_submodule, way))):
            yield way
        last = way


@dataclass(frozen=True)
class _Gone:
    """Nodes and modules of one part of a model that are gone.

    Attributes:
        part: as it was captured.
        chosen: its slots that stay.
        endings: of the branches that are gone.
        dead: what only these computed.
        joins: the sums that lose an operand.
        modules: by path, the tensors that each computes and that were needed.
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
        """Return modules that compute nothing but branches and their sums."""
        nothing = {*self.dead, *self.joins, *_repeated(self.joins)}
        return _outermost(
            path
            for path, of in self.modules.items()
            if of & self.joins and _keeps_shape(of, self.dead)
            if all(node in nothing or _is_handed_on(node) for node in of)
        )

    def inner(self) -> list[str]:
        """Return modules that compute nothing but branches."""
        return _outermost(path for path, of in self.modules.items() if of <= self.dead)

    def is_written_between(self, inner: Iterable[str]) -> bool:
        """Return whether branches write in place, outside of these modules."""
        skipped = {node for path in inner for node in self.modules[path]}
        return any(is_writer(node) for node in self.dead - skipped)


def _way(plain: nn.Module, gone: _Gone, whole_blocks: bool) -> dict[str, Layer]:
    """Return what modules of one part become, by path."""
    blocks = gone.whole_blocks() if whole_blocks else []
    inner = [p for p in gone.inner() if not any(is_within(p, block) for block in blocks)]
    gives: dict[str, dict[str, Any]] = {path: {"gives": "input"} for path in (*blocks, *inner)}
    calls = called(plain, list(gives), gone.part)
    if gone.is_written_between(
        (*blocks, *inner)
    ):  # into what backward needs of the stream, or of another
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
    """Set all that it reads of itself: the module may have attributes of its own by these names."""
    same = {"windows": (), "dim": 0, "channels": 0}
    return Layer(
        {**same, **gives, "at": call.at, "results": call.results}, kind=SkippedModule.__name__
    )


def _before(ends: Set[Node], dead: Set[Node]) -> set[Node]:
    """Return what is gone that these are made of, themselves among it."""
    found, pending = set(ends), [*ends]
    while pending:
        new = {each for each in pending.pop().all_input_nodes if each in dead} - found
        found |= new
        pending += new
    return found


def _last_ones(mine: Mapping[str, Set[Node]], dead: Set[Node]) -> dict[str, set[Node]]:
    """Return the modules of a branch from which no other one takes, and what each is made of.
    There are several where a branch is the sum of paths side by side.
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
    """Return the tensors each module computes that are needed; if called again, in all calls.

    A number that two of them take of some sizes is computed in the first one alone.
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
    """Yield activations of a sum whose operand without the branch has been through one already."""
    for join in joins:
        for user in join.users:
            if operator_name(user.target) in _ACTIVATIONS:
                yield user


def _keeps_shape(nodes: Set[Node], dead: Set[Node]) -> bool:
    """Check that what a module gives, but for what is dead, has a shape that it takes."""
    taken = {each for node in nodes for each in node.all_input_nodes} - nodes
    shapes = [shape_of(each) for each in taken]
    given = (node for node in nodes - dead if not node.users.keys() <= nodes)
    return all(shape_of(node) in shapes for node in given)


def _is_handed_on(node: Node) -> bool:
    """Check that a node hands on its input: as a cast to the dtype that it has, or a reshape.

    Where the module gives the shape that it took, its reshapes have cancelled each other.
    """
    if operator_name(node.target) in _RESHAPES:
        return True
    if operator_name(node.target) not in _CASTS:
        return False
    given, got = (each.meta["val"] for each in (node.all_input_nodes[0], node))
    return (given.dtype, given.device, given.stride()) == (got.dtype, got.device, got.stride())


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are in no other one."""
    found = sorted(paths, key=len)
    return [p for i, p in enumerate(found) if not any(is_within(p, o) for o in found[:i])]


def around(own: OwnClass, way: Mapping[str, Layer], plan: Plan, *, drops: bool = True) -> OwnClass:
    """Return the class in which these modules are skipped, and hold nothing.
    Parameters of branches that are gone it ``drops`` where code of other modules reads them; else
    they stay, at zero.
    """

    def is_skipped(name: str) -> bool:
        return any(is_within(name, path) for path in way)

    dead = dead_parameters(plan, [branch.name for branch in own.gone])
    parameters = {name for name, _ in own.plain.named_parameters(remove_duplicate=False)}
    tensors = dict(own.tensors)
    dropped = [name for name in dead if not is_skipped(name)] if drops else []
    for name, old in own.plain.state_dict().items():
        first = plan.aliases.get(name, name)
        if is_skipped(name) and old.ndim and (name not in parameters or first in dead):
            tensors[first] = torch.empty([0] * old.ndim, dtype=torch.float64)
    left = {name for name, tensor in tensors.items() if tensor.numel()} - set(dropped)
    scales = {name: by for name, by in own.scales.items() if name in left}
    others = {path: layer for path, layer in own.layers.items() if not is_skipped(path)}
    numbers = renumbered(own.plain, way)
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
        dropped=tuple(dropped),
    )
