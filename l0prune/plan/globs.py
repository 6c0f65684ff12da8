"""Settings for some axes or modules, chosen by name or glob.

A text equal to a name selects that name, whatever its characters (``blocks[0]``); any other text is
a glob. A glob without a match is an error: a typo must not leave a layer unprotected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from l0prune.errors import UsageError
from l0prune.plan.plan import Plan

Default = TypeVar("Default")
Globs = str | Iterable[str]
"""One glob, or several."""


def per_axis(
    plan: Plan, given: float | Mapping[str, float], default: Default, what: str
) -> list[float | Default]:
    """The value of each axis: that of the first glob which matches its name, else ``default``.

    ``given`` is one value for all or a mapping from globs; ``what`` names the setting, for people.
    Raises:
        UsageError: a glob matches no axis.
    """
    rules = tuple(given.items()) if isinstance(given, Mapping) else (("*", given),)
    return by_rules(plan.names, rules, default, what)


def by_rules(
    names: Sequence[str], rules: Sequence[tuple[str, float]], default: Default, what: str
) -> list[float | Default]:
    """Return for each axis name the value of the first rule, a glob with a value, to match it."""
    values: list[float | Default] = [default] * len(names)
    for glob, value in reversed(rules):
        for number in matching(names, glob, what):
            values[number] = value
    return values


def named(names: Sequence[str], globs: Globs, what: str, of_what: str) -> list[str]:
    """The names that one of the globs matches, in their order; see ``matching``."""
    several = (globs,) if isinstance(globs, str) else globs
    found = {number for glob in several for number in matching(names, glob, what, of_what)}
    return [names[number] for number in sorted(found)]


def matching(names: Sequence[str], glob: str, what: str, of_what: str = "gated axis") -> list[int]:
    """Return the indices of the names that a name or glob selects.

    ``what`` names the setting, and ``of_what`` the kind of the names, for messages.

    Raises:
        UsageError: there is none.
    """
    found = [number for number, name in enumerate(names) if name == glob]
    found = found or [number for number, name in enumerate(names) if fnmatchcase(name, glob)]
    if not found and glob != "*":
        close = " or ".join(map(repr, get_close_matches(glob, names)))
        meant = f" Did you mean {close}?" if close else ""
        raise UsageError(
            f"{what} is given for {glob!r}, which matches no {of_what}.{meant} "
            f"There are: {listed(names)}."
        )
    return found


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return a text that lists the names; only the first ``most`` where there are more."""
    first = ", ".join(names[:most])
    return f"{first}, … ({len(names)} in all)" if len(names) > most else first
