"""Modules of a model that nothing needs any more, since branches are gone.

Its own class goes on as it is where these give their input back. A block of which all branches are
gone gives back what it takes; else the last modules of a branch give zeros, or nothing where it was
put beside others, and those before it hand their input on. Whether that is right, the comparison
of the class shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from l0prune.capture.provenance import is_within, modules_of, without_call
from l0prune.exporting.own_class.calls import Called, called
from l0prune.exporting.own_class.choice import OwnClass
from l0prune.exporting.own_class.layers import Layer
from l0prune.exporting.own_class.numbering import renumbered
from l0prune.exporting.own_class.resizing import joined
from l0prune.exporting.own_class.windows import windows_to
from l0prune.exporting.slicing.chosen import Chosen
from l0prune.files.pretrained.cut_layers import sizes_after
from l0prune.infer.ending import Ending
from l0prune.infer.nodes import has_tensor, operator_name, shape_of
from l0prune.infer.parts import Part
from l0prune.plan.layout import leaves, size_of
from l0prune.plan.needs import is_needed
from l0prune.plan.plan import Plan

_KIND = "PassedBy"
_ACTIVATIONS = ("aten.relu", "aten.relu_")  # of what is one already, they change nothing
_CASTS = ("aten.to", "aten.contiguous")  # hand on what is as it should be


def ways_around(
    plain: nn.Module, parts: Sequence[Part], by_part: Mapping[str, Chosen], gone: Collection[str]
) -> Iterator[dict[str, Layer]]:
    """By path what modules become, the way that leaves least to compute first; none if none is.

    Args:
        plain: the ungated model at its old sizes.
        parts: of it, as they were captured.
        by_part: by path, the slots that stay.
        gone: names of the branches that are gone.
    """
    last: dict[str, Layer] | None = None
    for whole_blocks in (True, False) if gone else ():
        way: dict[str, Layer] = {}
        for part in parts:
            way |= _way(plain, part, by_part[part.path], gone, whole_blocks)
        if way != last:
            yield way
        last = way


def _way(
    plain: nn.Module, part: Part, chosen: Chosen, gone: Collection[str], whole_blocks: bool
) -> dict[str, Layer]:
    branches = part.analysis.branches
    endings = [each for each in branches.endings if each.name in gone]
    nodes = _nodes_by_module(plain, part)
    joins = {join for ending in endings for join in ending.joins if ending.tensors}
    dead = branches.dead(gone)
    gives: dict[str, dict[str, Any]] = {}
    if whole_blocks:
        nothing = {*dead, *joins, *_repeated(joins)}
        blocks = (
            path
            for path, of in nodes.items()
            if of & joins and all(node in nothing or _is_handed_on(node) for node in of)
        )
        gives |= {path: {"gives": "input"} for path in _outermost(blocks)}
    inner = _outermost(p for p, of in nodes.items() if of <= dead)
    inner = [path for path in inner if not any(is_within(path, whole) for whole in gives)]
    gives |= {path: {"gives": "input"} for path in inner}
    calls = called(plain, list(gives), part)
    for ending in endings:
        before = _before({ending.end}, dead)
        mine = {path: nodes[path] & before for path in inner if nodes[path] & before}
        stream = _channels(part, chosen, ending.joins[0]) if mine else None
        for last, made_of in _last_ones(mine, dead).items():
            makers = [path for path in mine if mine[path] & made_of]
            shapes = [calls[path].shape if path in calls else None for path in makers]
            kept = calls[last].shape if None not in shapes else None
            starts = {each for node in made_of for each in node.all_input_nodes} - before
            gives[last] = _instead(ending, starts, before, stream, kept)
    return {path: _layer(what, calls[path]) for path, what in gives.items() if path in calls}


def _layer(gives: Mapping[str, Any], call: Called) -> Layer:
    """All that it reads of itself: the module may have attributes of its own by these names."""
    same = {"windows": (), "dim": 0, "channels": 0}
    return Layer({**same, **gives, "at": call.at, "results": call.results}, kind=_KIND)


def _before(ends: Set[Node], dead: Set[Node]) -> set[Node]:
    """What is gone that these are made of, themselves among it."""
    found, pending = set(ends), [*ends]
    while pending:
        new = {each for each in pending.pop().all_input_nodes if each in dead} - found
        found |= new
        pending += new
    return found


def _last_ones(mine: Mapping[str, Set[Node]], dead: Set[Node]) -> dict[str, set[Node]]:
    """Modules of a branch from which no other one takes, and what each is made of.

    There are several where a branch is the sum of paths side by side.

    Args:
        mine: by path, what each module computes of the branch.
        dead: what is gone.
    """
    made_of = {path: _before(nodes, dead) for path, nodes in mine.items()}

    def feeds(path: str, other: str) -> bool:
        return bool(mine[path] & made_of[other])

    return {
        path: nodes
        for path, nodes in made_of.items()
        if all(feeds(other, path) for other in mine if feeds(path, other))
    }


def _instead(
    ending: Ending,
    starts: Set[Node],
    before: Set[Node],
    stream: Channels | None,
    kept: Sequence[int] | None,
) -> dict[str, Any]:
    """What its last module gives if it is handed what the first one took: nothing, or zeros.

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
        return _zeros(*_channels_of(kept, kept, stream))
    wanted, unknown = shape_of(ending.joins[0]) or [], {"gives": "zero"}
    for given in sorted(starts):
        given_sizes = shape_of(given)
        if given_sizes is None or len(given_sizes) != len(wanted):
            continue
        for windows in windows_to(ending.end, given, before):
            sizes = sizes_after(given_sizes, windows)
            dim, channels = _channels_of(sizes, wanted, stream)
            if all(size == wanted[at] or (at == dim and dim) for at, size in enumerate(sizes)):
                return {**_zeros(dim, channels), "windows": windows}
    return unknown


def _zeros(dim: int, channels: int) -> dict[str, Any]:
    return {"gives": "zeros", "dim": dim, "channels": channels}


@dataclass(frozen=True)
class Channels:
    """How many channels there were, and how many are left."""

    before: int
    left: int


def _channels(part: Part, chosen: Chosen, join: Node) -> Channels | None:
    """Of what a sum gives: the one dim of it that may be cut; None if that is not one."""
    layouts = part.analysis.layouts.get(join.name, ())
    found = [layout for layout in layouts if any(True for _ in leaves(layout))]
    if len(found) != 1:
        return None
    (layout,) = found
    return Channels(size_of(layout), int(chosen.plan.mask(layout, chosen.kept).sum()))


def _channels_of(
    sizes: Sequence[int], wanted: Sequence[int], stream: Channels | None
) -> tuple[int, int]:
    """The dim of the channels, and how many a branch has there; zeros if it has those it is given.

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


def _nodes_by_module(plain: nn.Module, part: Part) -> dict[str, set[Node]]:
    """By path, the tensors each module computes that are needed; if called again, in all calls.

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
    """Activations of a sum whose operand without the branch has been through one already."""
    for join in joins:
        for user in join.users:
            if operator_name(user.target) in _ACTIVATIONS:
                yield user


def _is_handed_on(node: Node) -> bool:
    """Is its input, as it came, what it gives? A norm casts it to a dtype that it has already."""
    if operator_name(node.target) not in _CASTS:
        return False
    given, got = (each.meta["val"] for each in (node.all_input_nodes[0], node))
    return (given.dtype, given.device, given.stride()) == (got.dtype, got.device, got.stride())


def _outermost(paths: Iterable[str]) -> list[str]:
    """Those that are in no other one."""
    found = sorted(paths, key=len)
    return [p for i, p in enumerate(found) if not any(is_within(p, o) for o in found[:i])]


def around(own: OwnClass, way: Mapping[str, Layer], plan: Plan) -> OwnClass:
    """The class in which these modules are passed by, and hold nothing.

    Args:
        own: what it may be with all of them.
        way: by path, what they become.
        plan: of the model.
    """

    def is_passed(name: str) -> bool:
        return any(is_within(name, path) for path in way)

    needed: dict[str, bool] = {}
    gone = [branch.name for branch in own.gone]
    for cost in plan.costs:
        if cost.unit == "params":
            needed[cost.tensor] = is_needed(cost.needed, gone)
    parameters = {name for name, _ in own.plain.named_parameters(remove_duplicate=False)}
    tensors = dict(own.tensors)
    for name, old in own.plain.state_dict().items():
        first = plan.aliases.get(name, name)
        if is_passed(name) and old.ndim and (name not in parameters or not needed.get(first, True)):
            tensors[first] = torch.empty([0] * old.ndim, dtype=torch.float64)
    scales = {name: by for name, by in own.scales.items() if tensors[name].numel()}
    others = {path: layer for path, layer in own.layers.items() if not is_passed(path)}
    numbers = renumbered(own.plain, way)
    candidates = (
        {path: new for path, new in changes.items() if not is_passed(path)}
        for changes in own.candidates
    )
    return replace(
        own,
        tensors=tensors,
        candidates=tuple(joined(changes, numbers) for changes in candidates),
        layers={**others, **way},
        scales=scales,
        gone=(),
    )
