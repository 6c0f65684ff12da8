"""Texts of budgets, such as ``layer3.*: params=0.3``, and the units of measures; without torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from l0prune.doors import behind, missing
from l0prune.errors import UsageError, meant

COUNTED = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS: dict[str, Mapping[str, float]] = {  # of the measures of the core
    "params": COUNTED,
    "macs": COUNTED,
    "width": {"": 1.0},
    "heads": {"": 1.0},
    "latency": {"ms": 1.0, "us": 1e-3, "µs": 1e-3, "s": 1e3},
    "bops": COUNTED,
}
SPEED = "speed"  # name of budgets in times as fast
HELP = (
    "write speed=2, macs=0.5, params=10k, 'macs=50%, params=0.1', 'layer3.*: params=0.3' or "
    "'layer3.*: width=0.5'"
)
_NUMBER = re.compile(r"(?P<value>\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(?P<suffix>[^\W\d_]*|%)")


class Written(NamedTuple):
    """Parts of a limit's text: ``glob: measure=value suffix @at``.

    ``digits`` is the value's text; ``at`` are conditions, such as the context of ``memory``.
    """

    text: str
    glob: str
    measure: str
    value: float
    suffix: str
    digits: str
    at: str = ""


def written(text: str) -> Iterator[Written]:
    """Yield the parts of each limit in a text, separated by commas.

    Raises:
        UsageError: one of them cannot be read.
    """
    for part in text.split(","):
        head, equals, amount = part.rpartition("=")
        glob, colon, measure = head.rpartition(":")
        if not equals or (colon and not glob.strip()):
            raise UsageError(f"cannot read the budget {part.strip()!r}; {HELP}")
        amount, _, at = amount.partition("@")
        number = _NUMBER.fullmatch(amount.strip())
        if number is None:
            raise UsageError(
                f"cannot read {amount.strip()!r} in the budget {part.strip()!r}; {HELP}"
            )
        digits, meant_by = number["value"], glob.strip() or "*"
        parts = meant_by, measure.strip(), float(digits), number["suffix"], digits, at.strip()
        yield Written(part.strip(), *parts)


def check_measure(name: str, known: Collection[str]) -> None:
    """Raise UsageError if a measure is none of the known ones."""
    if name not in known:
        raise UsageError(
            missing(name)
            or f"a budget is about one of {', '.join(known)}, not {name!r}"
            f"{meant(name, (*known, SPEED)) or '.'} A measure of your own takes a class under "
            "@l0prune.measures.register (docs/extending.md), and on the command line "
            "--measure file.py:Class"
        )


def known_units() -> dict[str, Mapping[str, float]]:
    """Return the units of the measures of the core and of all features."""
    return UNITS | {name: feature.units[name] for name, feature in behind("units")}


def check_texts(texts: Iterable[str], units: Mapping[str, Mapping[str, float]]) -> None:
    """Check that budgets can be read, and are about measures with these units.

    Raises:
        UsageError: one of them cannot be read, or is about something else, or in another unit.
    """
    for part in (part for text in texts for part in written(text)):
        if part.measure == SPEED:
            continue
        check_measure(part.measure, units)
        if part.suffix not in ("", "%"):
            check_unit(part, units[part.measure])


def check_unit(part: Written, units: Mapping[str, float]) -> None:
    """Raise UsageError if an amount is in none of a measure's units."""
    if part.suffix in units:
        return
    name, value = part.measure, part.value
    shown = ", ".join(f"{name}={value:g}{each}" for each in units if each)
    wrong = f"{part.suffix!r} is none of its units." if part.suffix else f"{value:g} of what?"
    raise UsageError(
        f"cannot read {value:g}{part.suffix} in the budget {part.text!r}: {wrong} Write {shown}, "
        f"or a share such as {name}=0.5"
    )
