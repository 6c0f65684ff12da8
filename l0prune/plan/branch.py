"""Branches of a network, as data, and under which of them something is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KIND = "branch"  # of the axes that are switches: they may close completely


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of the network that is added to a stream, or concatenated, and serves nothing else.

    Attributes:
        name: of the module that computes it, unique among branches and axes.
        tensors: the parameters with which all of it is multiplied: where they are zero, it is.
            Empty where it is one part of concatenations.
        size: the parameters that only it needs.
        modules: those all of whose own work is the branch's.
        axes: the names of those that are the part of a concatenation that it is.
        closing: the names of those without any of which it is zero.
    """

    name: str
    tensors: tuple[str, ...]
    size: int
    modules: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()


Needs = frozenset[frozenset[str]]
"""Sets of branches: where all of one set are there, it is needed. The empty set: always."""

ALWAYS: Needs = frozenset([frozenset()])


def shortest(wanted: Iterable[frozenset[str]]) -> Needs:
    """Without those of which another one is a part."""
    every = set(wanted)
    return frozenset(each for each in every if not any(other < each for other in every))


def is_needed(of: Iterable[Iterable[str]], gone: Iterable[str]) -> bool:
    """Return whether something is needed without these branches."""
    out = set(gone)
    return any(out.isdisjoint(each) for each in of)


def vital(of: Iterable[frozenset[str]]) -> frozenset[str]:
    """The branches without any single one of which something is not needed."""
    return frozenset.intersection(*sets) if (sets := list(of)) else frozenset()


def in_switches(
    of: Iterable[Iterable[str]], switches: Mapping[str, int]
) -> dict[frozenset[int], int]:
    """1 where it is needed and else 0, as a polynomial: coefficients of products of switches.

    By inclusion and exclusion. Branches without a switch are there.
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
