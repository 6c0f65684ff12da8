"""Facts about a network's nodes known without timing, and groups of nodes that are timed as one."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter

from l0prune.features.latency.sizes import Dims, Size
from l0prune.plan.branch import Branch
from l0prune.plan.layout import Layout, to_json
from l0prune.plan.plan import Plan
from l0prune.plan.switches import without_switches


def plan_id(plan: Plan) -> str:
    """Return a digest of the plan's axes and tensor layouts: only these of the plan affect times.

    It is the same whichever branches have a switch and whatever bits are learned, so one table
    serves all of these.
    """
    axes = [[axis.name, axis.size] for axis in plan.axes if axis.is_width]
    tensors = {
        name: [to_json(without_switches(plan, dim)) for dim in dims]
        for name, dims in plan.tensors.items()
    }
    return hashlib.sha256(json.dumps([axes, tensors], sort_keys=True).encode()).hexdigest()[:16]


Monomial = tuple[Layout, ...]
"""Product of sizes, given as their layouts; empty for a constant."""


INPUT = -1
_SUMS = ("Add", "Sum", "add", "add_")  # of ONNX and torch


@dataclass(frozen=True)
class NodeFacts:
    """Operator, owner and tensor sizes of one node, independent of the widths.

    Attributes:
        owner: path of the module whose code the node is from, if known.
        has_weights: whether it reads a weight of two or more dims.
        reads: numbers of the nodes that it reads, and ``INPUT`` for an input of the network.
        monomials: sizes of the tensors that it reads and writes, up to constant factors.
        kind: digest of all else that its time depends on: attributes, and constant factors of the
            sizes. Empty if unknown.
    """

    operator: str
    owner: str
    has_weights: bool
    reads: tuple[int, ...]
    monomials: tuple[Monomial, ...]
    kind: str = ""


FACTS = TypeAdapter(list[NodeFacts])


def facts_of_node(
    node: tuple[str, str, bool, tuple[int, ...]],
    tensors: Sequence[Dims],
    fixed: Sequence[object],
    numbers: Dims = (),
) -> NodeFacts:
    """Return the facts of a node, from its first four and the sizes of its tensors' dims.

    Args:
        node: ``operator``, ``owner``, ``has_weights`` and ``reads`` of ``NodeFacts``.
        tensors: dims of each tensor.
        fixed: attributes that are the same at all widths.
        numbers: attributes that follow the widths.
    """
    free = ([s.layout for s in dims if s and not s.is_constant] for dims in tensors)
    monomials = tuple(dict.fromkeys(tuple(sorted(found, key=str)) for found in free))
    place = {layout: number for number, layout in enumerate(_layouts_in(monomials))}

    def as_numbers(size: Size) -> tuple[int, ...]:
        where = -1 if size.is_constant else place.setdefault(size.layout, len(place))
        return where, size.times, size.over, size.offset

    known = [[size and as_numbers(size) for size in dims] for dims in (*tensors, numbers)]
    is_known = all(None not in dims for dims in known)
    kind = _digest(node[0], [str(each) for each in fixed], known) if is_known else ""
    return NodeFacts(*node, monomials, kind)


def _digest(*known: object) -> str:
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _layouts_in(monomials: Sequence[Monomial]) -> tuple[Layout, ...]:
    """Return the layouts that occur in monomials, in order."""
    return tuple(dict.fromkeys(layout for monomial in monomials for layout in monomial))


def number_of(node: int) -> str:
    """Return the node's number as text, as in its name and in the results of ``collect``."""
    return f"{node:05d}"


Times = Mapping[str, float]
"""Milliseconds by the number of the node, as text."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds control characters")
    return text


Name = Annotated[str, AfterValidator(_printable)]


@dataclass(frozen=True)
class Group:
    """Group: nodes that are timed as one, since the runtime may fuse them.

    Attributes:
        owner: path of the module of the first node with weights, else of the first, if known.
        operator: of the same node.
        nodes: numbers of the nodes.
        monomials: sizes of the tensors read and written, up to factors; the constant first.
        branches: names of the branches of which the removal of any one removes the nodes.
        kind: digest of the kinds of the nodes: groups of one kind take the same time at the same
            sizes. Empty if unknown.
    """

    owner: Name
    operator: Name
    nodes: tuple[Name, ...]
    monomials: tuple[Monomial, ...]
    branches: tuple[Name, ...] = ()
    kind: Name = ""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that occur in the monomials."""
        return _layouts_in(self.monomials)

    def time(self, times: Times) -> float:
        """Return the milliseconds of all nodes together."""
        return sum(times.get(node, 0.0) for node in self.nodes)


def groups_of(
    facts: Sequence[NodeFacts], samples: Sequence[Times], branches: Sequence[Branch] = ()
) -> tuple[Group, ...]:
    """Return the groups, in the order of the nodes, without those that no sample timed.

    At some widths the runtime fuses nodes. A node without weights that is missing in some sample
    joins the group of the last node that it reads. So does each node without weights that reads a
    missing node with weights, whose time is then found under the name of its reader.
    """
    seen = [sum(number_of(i) in times for times in samples) for i in range(len(facts))]
    leader = list(range(len(facts)))
    for number, node in enumerate(facts):
        before = max(node.reads, default=INPUT)
        if before == INPUT or node.has_weights:
            continue
        is_hidden = facts[before].has_weights and seen[before] < len(samples)
        if seen[number] < len(samples) or is_hidden:
            leader[number] = leader[before]
    members: dict[int, list[int]] = defaultdict(list)
    for number, first in enumerate(leader):
        members[first].append(number)
    gone = _gone_with(facts, branches)
    return tuple(
        _group(facts, numbers, gone)
        for numbers in members.values()
        if any(seen[number] for number in numbers)
    )


def _group(
    facts: Sequence[NodeFacts], numbers: Sequence[int], gone: Mapping[int, Sequence[str]]
) -> Group:
    first = next((i for i in numbers if facts[i].has_weights), numbers[0])
    monomials: dict[Monomial, None] = {(): None}
    for number in numbers:
        monomials |= dict.fromkeys(facts[number].monomials)
    place = {layout: i for i, layout in enumerate(_layouts_in([*monomials]))}
    kinds = [
        (facts[number].kind, [place[each] for each in _layouts_in(facts[number].monomials)])
        for number in numbers
    ]
    return Group(
        owner=facts[first].owner,
        operator=facts[first].operator,
        nodes=tuple(map(number_of, numbers)),
        monomials=tuple(monomials),
        branches=tuple(gone[first]),
        kind=_digest(*kinds) if all(kind for kind, _ in kinds) else "",
    )


def _gone_with(
    facts: Sequence[NodeFacts], branches: Sequence[Branch]
) -> Mapping[int, Sequence[str]]:
    """Return for each node the names of the branches whose removal removes the node.

    A branch removes the nodes of its modules, nodes that read nothing else or are read by nothing
    else, and the sum that adds the branch to the stream.
    """
    readers: dict[int, set[int]] = defaultdict(set)
    for number, node in enumerate(facts):
        for read in node.reads:
            readers[read].add(number)
    found: dict[int, list[str]] = defaultdict(list)
    for branch in branches:
        mine = {number for number, node in enumerate(facts) if node.owner in branch.modules}
        sums = set()
        for number, node in enumerate(facts):
            if node.reads and mine.issuperset(node.reads):
                mine.add(number)
            elif node.operator in _SUMS and not mine.isdisjoint(node.reads):
                sums.add(number)
        for number in reversed(range(len(facts))):
            if readers[number] and mine.issuperset(readers[number]):
                mine.add(number)
        for number in mine | sums:
            found[number].append(branch.name)
    return found
