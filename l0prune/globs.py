"""Settings that may differ between axes, given by globs over axis names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from l0prune.errors import UsageError
from l0prune.plan import Plan

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
    by_glob = given if isinstance(given, Mapping) else {"*": given}
    for glob in by_glob:
        if not any(fnmatchcase(name, glob) for name in plan.names):
            raise UsageError(
                f"{what} is given for {glob!r}, which matches no gated axis; "
                f"the gated axes are {listed(plan)}"
            )
    return [
        next((value for glob, value in by_glob.items() if fnmatchcase(name, glob)), default)
        for name in plan.names
    ]


def listed(plan: Plan, most: int = 20) -> str:
    """The names of the axes, for people; the first ones where there are many."""
    names = ", ".join(plan.names[:most])
    return f"{names}, … ({len(plan.axes)} in all)" if len(plan.axes) > most else names
