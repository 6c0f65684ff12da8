"""The names of phases above what they are the ground of: each is there, however narrow it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.report.page.elements import text

_LETTER, _GAP = 7.2, 10


@dataclass(frozen=True)
class Band:
    """A phase in a picture, from ``left`` to ``right``."""

    name: str
    left: float
    right: float


def names(bands: Sequence[Band], y: float, width: float) -> list[Markup]:
    """The name of each band, where the band begins.

    Where there is no room the first one reaches out to the left, the last one too, and those
    between them to the right.

    Args:
        bands: from left to right.
        y: of the line that they are written on.
        width: of the picture.
    """
    longs = [_LETTER * len(band.name) for band in bands]
    places, free = [], 0.0
    for number, (band, long) in enumerate(zip(bands, longs, strict=True)):
        is_first = not number and long > band.right - band.left
        places.append(max(free, band.right - long - _GAP if is_first else band.left + 1))
        free = places[-1] + long + _GAP
    end = width
    for number in reversed(range(len(bands))):
        places[number] = min(places[number], end - longs[number])
        end = places[number] - _GAP
    return [text(x, y, band.name, class_="phase") for x, band in zip(places, bands, strict=True)]
