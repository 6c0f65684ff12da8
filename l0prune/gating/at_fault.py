"""Search for the members of a group that make an attempt fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

Why = TypeVar("Why")


def at_fault(
    names: Sequence[str], attempt: Callable[[Collection[str]], Why | None]
) -> Iterator[tuple[str, Why]]:
    """Yield names without which an attempt with all others succeeds, each with a failure.

    Each is found by ever smaller groups. Of names that fail only together the last is at fault.
    """
    why = attempt(names) if names else None
    if why is None:
        return
    if len(names) == 1:
        yield names[0], why
        return
    half = len(names) // 2
    found = [each for part in (names[:half], names[half:]) for each in at_fault(part, attempt)]
    yield from found
    guilty = {name for name, _ in found}
    left = [name for name in names if name not in guilty]
    if not left or attempt(left) is None:
        return
    together: list[str] = []
    for name in left:
        why = attempt([*together, name])
        if why is None:
            together.append(name)
        else:
            yield name, why
