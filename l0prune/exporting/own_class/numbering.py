"""Modules of a list that remember which one they are, when some of them have nothing left to do.

A decoder's layers keep what they know of earlier tokens in a cache, each in the place of its
number, and how many tokens there were is asked of the first place. So those that are left take
the first places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from l0prune.capture.provenance import is_within, within
from l0prune.exporting.own_class.resizing import Changes

_PLAIN = (int, float, bool, str, type(None))

Place = tuple[str, str]  # path of a module, and name of an attribute


def renumbered(plain: nn.Module, passed: Collection[str]) -> Changes:
    """By path, the numbers that modules have to remember, so that those left have the first ones.

    Numbers change places among modules of one class and the same settings only: a cache may hold
    places of several kinds.

    Args:
        plain: the ungated model.
        passed: paths of the modules that nothing is left of.
    """
    found: Changes = defaultdict(dict)
    for name, alike in _alike(plain):
        left = [
            number
            for number, path in sorted(alike.items())
            if not any(is_within(path, each) for each in passed)
        ]
        for new, old in zip(sorted(alike), left, strict=False):
            if new != old:
                found[alike[old]][name] = new
    return dict(found)


def numbers_of(plain: nn.Module) -> set[Place]:
    """Which modules remember their number, by path, and what it is called."""
    return {(path, name) for name, alike in _alike(plain) for path in alike.values()}


def _alike(plain: nn.Module) -> Iterator[tuple[str, dict[int, str]]]:
    """What a number is called, and by it the paths of modules that differ in no other setting."""
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
    """Where each entry of a list, or those of them that have such a module, has its number.

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
