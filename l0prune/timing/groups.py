"""Nodes that a runtime runs as one, and the sizes that their time depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from l0prune.plan.layout import Layout
from l0prune.timing.facts import NodeFacts, number_of

Monomial = tuple[Layout, ...]
"""The layouts whose sizes are multiplied; none for a constant."""

Times = Mapping[str, float]
"""Milliseconds by the number of the node, as text."""


@dataclass(frozen=True)
class Group:
    """Nodes whose times are only known together.

    Attributes:
        owner: path of the module that the first of them belongs to, if that is known.
        operator: of the first that has weights, or of the first.
        nodes: their numbers.
        monomials: how many numbers they read and write, but for factors; the constant first.
    """

    owner: str
    operator: str
    nodes: tuple[str, ...]
    monomials: tuple[Monomial, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that occur in the monomials."""
        return tuple(dict.fromkeys(layout for monomial in self.monomials for layout in monomial))

    def time(self, times: Times) -> float:
        """Milliseconds of all of them."""
        return sum(times.get(node, 0.0) for node in self.nodes)


def groups_of(facts: Sequence[NodeFacts], samples: Sequence[Times]) -> tuple[Group, ...]:
    """The groups, in the order of the nodes, without those that take no time.

    Some nodes are fused into others at some widths. A node without weights that was not seen in
    some sample is taken together with the last one that it reads; one with weights that was not
    seen (its time is then found under the name of what follows it), with what follows it.
    """
    seen = [sum(number_of(i) in times for times in samples) for i in range(len(facts))]
    leader = list(range(len(facts)))
    for number, node in enumerate(facts):
        before = node.before
        if before is None or node.has_weights:
            continue
        is_hidden = facts[before].has_weights and seen[before] < len(samples)
        if seen[number] < len(samples) or is_hidden:
            leader[number] = leader[before]
    members: dict[int, list[int]] = defaultdict(list)
    for number, first in enumerate(leader):
        members[first].append(number)
    return tuple(
        _group(facts, numbers)
        for numbers in members.values()
        if any(seen[number] for number in numbers)
    )


def _group(facts: Sequence[NodeFacts], numbers: Sequence[int]) -> Group:
    head = next((facts[i] for i in numbers if facts[i].has_weights), facts[numbers[0]])
    monomials: dict[Monomial, None] = {(): None}
    for number in numbers:
        monomials |= dict.fromkeys(facts[number].monomials)
    return Group(head.owner, head.operator, tuple(map(number_of, numbers)), tuple(monomials))
