"""Branches of a network, as data, and the conditions under which other parts need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KIND = "branch"  # of the axes that are switches: they may close completely


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of the network that is added to a stream, or concatenated, and not used elsewhere.

    Attributes:
        name: of the module that computes it, unique among branches and axes.
        tensors: the parameters that make all of it zero where they are zero. Empty where it is
            one part of concatenations.
        size: the number of parameters that only it needs.
        modules: those whose work, without that of submodules, only the branch needs.
        axes: the names of the axes that form its part of a concatenation.
        closing: the names of the axes each of which makes it zero once all their slots are closed.
    """

    name: str
    tensors: tuple[str, ...]
    size: int
    modules: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()


Needs = frozenset[frozenset[str]]
"""Sets of branches: needed if all branches of one set are present. The empty set: always."""

ALWAYS: Needs = frozenset([frozenset()])


def shortest(wanted: Iterable[frozenset[str]]) -> Needs:
    """Return the sets without those that contain another one."""
    every = set(wanted)
    return frozenset(each for each in every if not any(other < each for other in every))


def is_needed(of: Iterable[Iterable[str]], gone: Iterable[str]) -> bool:
    """Return whether something is needed without these branches."""
    out = set(gone)
    return any(out.isdisjoint(each) for each in of)


def vital(of: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return the branches that are in all sets: without any one of them nothing is needed."""
    return frozenset.intersection(*sets) if (sets := list(of)) else frozenset()


def in_switches(
    of: Iterable[Iterable[str]], switches: Mapping[str, int]
) -> dict[frozenset[int], int]:
    """Return the indicator of need as a polynomial: coefficients of products of switches.

    By inclusion and exclusion. Branches without a switch are always present.
    """
    terms = shortest(frozenset(name for name in each if name in switches) for each in of)
    found: dict[frozenset[int], int] = {}
    products = [(frozenset[int](), -1)]
    for each in sorted(terms, key=sorted):
        mine = frozenset(switches[name] for name in each)
        products += [(names | mine, -sign) for names, sign in products]
    for names, sign in products[1:]:
        found[names] = found.get(names, 0) + sign
    return {names: sign for names, sign in found.items() if sign}
