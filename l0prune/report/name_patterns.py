"""Many numbered names as one: ``layer3.{0..5}.conv1``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Counters are numbers on their own (``blocks.3``) or inside a path (``layer3.0``), but not those
# at its end: conv1 is not conv2.
_COUNTER = re.compile(r"(?<!\w)\d+(?!\w)|(?<=[A-Za-z_])\d+(?=\.\w)")


def pattern(text: str) -> str:
    """The text with its counters masked: equal for texts that differ in nothing else."""
    return _COUNTER.sub("#", text)


def together(texts: Sequence[str]) -> str:
    """Texts of one pattern as a single one, with ranges where their counters differ."""
    counters = [_COUNTER.findall(text) for text in texts]
    ranges = iter([_range([int(n) for n in column]) for column in zip(*counters, strict=True)])
    return _COUNTER.sub(lambda match: next(ranges), texts[0])


def _range(numbers: Sequence[int]) -> str:
    """``3``, ``{0..5}`` or ``{1,4,6}``."""
    found = sorted(set(numbers))
    if len(found) == 1:
        return str(found[0])
    is_run = found == list(range(found[0], found[-1] + 1))
    if is_run and len(found) > 2:
        return f"{{{found[0]}..{found[-1]}}}"
    shown = found if len(found) < 5 else [*found[:2], "…", found[-1]]
    return "{" + ",".join(map(str, shown)) + "}"


def several(names: Iterable[str], most: int = 3) -> str:
    """Names in few words: those of one pattern as one, and no more than a few."""
    shown = [together(group) for group in grouped(names, pattern)]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return " + ".join(shown[:most]) + more


def grouped(things: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Things with the same key together, in the order in which each key first appears."""
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())
