"""Settings that may differ between axes, given by globs over axis names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from l0prune.errors import UsageError
from l0prune.plan.plan import Plan

Default = TypeVar("Default")


def per_axis(
    plan: Plan, given: float | Mapping[str, float], default: Default, what: str
) -> list[float | Default]:
    """The value of each axis: that of the first glob which matches its name, else ``default``.

    Args:
        plan: whose axes.
        given: one value for all, or a mapping from globs over axis names to values.
        default: for the axes that no glob matches.
        what: name of the setting, for people.

    Raises:
        UsageError: a glob matches no axis.
    """
    rules = tuple(given.items()) if isinstance(given, Mapping) else (("*", given),)
    return by_rules(plan.names, rules, default, what)


def by_rules(
    names: Sequence[str], rules: Sequence[tuple[str, float]], default: Default, what: str
) -> list[float | Default]:
    """For each name of an axis the value of the first rule, a glob with a value, that matches it.

    Raises:
        UsageError: a glob matches no axis.
    """
    for glob, _ in rules:
        matching(names, glob, what)
    return [
        next((value for glob, value in rules if fnmatchcase(name, glob)), default) for name in names
    ]


def matching(names: Sequence[str], glob: str, what: str) -> list[int]:
    """Numbers of the axes that a glob means.

    Raises:
        UsageError: there is none.
    """
    found = [number for number, name in enumerate(names) if fnmatchcase(name, glob)]
    if not found:
        raise UsageError(
            f"{what} is given for {glob!r}, which matches no gated axis; "
            f"the gated axes are {listed(names)}"
        )
    return found


def listed(names: Sequence[str], most: int = 20) -> str:
    """The names of the axes, for people; the first ones where there are many."""
    first = ", ".join(names[:most])
    return f"{first}, … ({len(names)} in all)" if len(names) > most else first
