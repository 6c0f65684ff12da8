"""Checks of numbers from users and files against bounds, and short texts of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from l0prune.errors import UsageError

MOST = 2**31 - 1  # of examples in a batch, of steps
SEEDS = 2**32 - 1  # the largest that NumPy takes
THREADS = 2**12
NETWORKS = 10**5  # that are timed for a table
LARGE = ("", " k", " M", " G", " T")  # thousands of a count
LARGEST = 1e12  # of prices, rates and milliseconds


def check_whole(name: str, number: object, least: int = 1, most: int = MOST) -> None:
    """Raise UsageError unless ``number`` is a whole number within bounds."""
    if type(number) is not int or not least <= number <= most:
        raise UsageError(
            f"{name} must be a whole number from {least:,} to {most:,}, not {_shown(number)}"
        )


def check_number(name: str, number: object, least: float = 0.0, most: float = LARGEST) -> None:
    """Raise UsageError unless ``number`` is a finite number within bounds."""
    if not is_number(number, least, most):
        raise UsageError(
            f"{name} must be a number from {least:g} to {most:g}, not {_shown(number)}"
        )


def is_number(number: object, least: float = 0.0, most: float = LARGEST) -> bool:
    """Return whether this is an int or a float within bounds, which nan never is."""
    return type(number) in (int, float) and least <= number <= most  # type: ignore[operator]


def is_count(number: object, most: int = 2**63 - 1) -> bool:
    """Return whether this is a whole number from 0 to ``most``."""
    return type(number) is int and 0 <= number <= most


def _shown(number: object) -> str:
    text = repr(number) if not isinstance(number, int) or abs(number) < 10**20 else "one as large"
    return text if len(text) <= 40 else f"{text[:40]}…"


_TOLERANCE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*")


def tolerance_of(given: float | str) -> float:
    """Return a tolerance as a fraction of 1.

    Raises:
        UsageError: it is not between 0 and 1.
    """
    if isinstance(given, str):
        matched = _TOLERANCE.fullmatch(given)
        given = math.nan if matched is None else float(matched[1]) / (100 if matched[2] else 1)
    if not 0 < given < 1:
        raise UsageError("a tolerance is a part of 1 between 0 and 1, such as '1%' or 0.01")
    return given


def in_thousands(amount: float, units: Sequence[str]) -> str:
    """Format an amount with three digits: ``13.8 k``.

    Args:
        amount: in the first unit.
        units: as they follow the number, each a thousand of the one before it.
    """
    value, last = float(amount), 0
    while abs(value) >= 999.5 and last + 1 < len(units):
        value, last = value / 1000, last + 1
    return f"{value:.3g}{units[last]}"
