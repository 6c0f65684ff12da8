"""Histogram of the gates at the end of each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from markupsafe import Markup

from l0prune.report.content import Epoch, Training
from l0prune.report.page import panel
from l0prune.report.page.elements import drawing, element, is_narrow, text, titled
from l0prune.report.page.panel import Band

UNDECIDED = (0.1, 0.9)  # P(z ≠ 0) of a gate that has not decided
_COLUMNS = 60  # epochs that are shown at most
_SHADES = 9
_LEFT, _RIGHT, _CELL, _LINE, _KEY = 52, 8, 7.0, 17, 11


def undecided(counts: Sequence[int]) -> int:
    """Count the gates that are neither open nor closed, from counts by bin of P(z ≠ 0)."""
    bins = len(counts)
    low, high = (round(edge * bins) for edge in UNDECIDED)
    return sum(counts[low:high])


def gates(training: Training, width: int) -> Markup:
    """The distribution of P(z ≠ 0) at the end of each epoch: the darker, the more gates.

    Args:
        training: with an epoch that has counted its gates.
        width: of the picture.
    """
    shown = _some([epoch for epoch in training.epochs if epoch.gates])
    narrow, phases = is_narrow(width), any(epoch.phase for epoch in shown)
    top = 28.0 + _LINE * (1 + narrow + phases)
    height = _CELL * len(shown[-1].gates)
    column = (width - _LEFT - _RIGHT) / len(shown)
    columns = [_column(e, _LEFT + column * n, column, top) for n, e in enumerate(shown)]
    drawn = [*_head(shown[-1], width, narrow), *columns]
    for share in (0.0, UNDECIDED[0], 0.5, UNDECIDED[1], 1.0):
        y, kind = top + height * (1 - share), "edge" if share in UNDECIDED else "grid"
        drawn.append(text(_LEFT - 6, y + 4, f"{share:g}", class_="tick", text_anchor="end"))
        drawn.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y, class_=kind))
    drawn += _phases(shown, column, top, height, width)
    ends = {0: ("start", 0.0), len(shown) // 2: ("middle", 0.5), len(shown) - 1: ("end", 1.0)}
    for number, (anchor, part) in ends.items():
        x, label = _LEFT + column * (number + part), f"epoch {shown[number].epoch:,}"
        drawn.append(text(x, top + height + 18, label, class_="tick", text_anchor=anchor))
    return drawing(width, top + height + 26, _said(shown[-1]), *drawn)


def _head(last: Epoch, width: int, narrow: bool) -> list[Markup]:
    """The title, how many are undecided, and what the shades mean."""
    low, high = UNDECIDED
    rest = (
        f"{undecided(last.gates):,} of {sum(last.gates):,} undecided ({low} to {high}) at the end"
    )
    place = (0, 13 + _LINE, "start") if narrow else (width - _RIGHT, 13, "end")
    y = 13 + _LINE * (1 + narrow)
    left = 0 if narrow else _LEFT
    start = left + 46
    shades = [
        element("rect", x=start + _KEY * n, y=y - 9, width=_KEY, height=_KEY, class_=f"s{n + 1}")
        for n in range(_SHADES)
    ]
    end = start + _KEY * _SHADES + 6
    return [
        text(0, 13, "Gates by the probability that they are open", class_="heading"),
        text(place[0], place[1], rest, class_="tick", text_anchor=place[2]),
        text(left, y, "1 gate", class_="tick"),
        *shades,
        text(end, y, f"all {sum(last.gates):,}, by the square root", class_="tick"),
    ]


def _column(epoch: Epoch, x: float, width: float, top: float) -> Markup:
    bins, total = len(epoch.gates), max(sum(epoch.gates), 1)
    size = {"width": width, "height": _CELL}
    cells = [
        element("rect", x=x, y=top + _CELL * (bins - 1 - bin), class_=f"s{shade}", **size)
        for bin, count in enumerate(epoch.gates)
        if (shade := ceil(_SHADES * sqrt(count / total)))
    ]
    return titled(_said(epoch), *cells)


def _phases(
    shown: Sequence[Epoch], column: float, top: float, height: float, width: float
) -> list[Markup]:
    """The names of phases, and a line where each but the first begins."""
    starts = [
        n for n, e in enumerate(shown) if e.phase and (not n or shown[n - 1].phase != e.phase)
    ]
    ends = [*starts[1:], len(shown)]
    found = [
        Band(shown[start].phase, _LEFT + column * start, _LEFT + column * end)
        for start, end in zip(starts, ends, strict=False)
    ]
    lines = [
        element("line", x1=band.left, x2=band.left, y1=top, y2=top + height, class_="begins")
        for band in found[1:]
    ]
    return [*lines, *panel.band_names(found, top - 8, width)]


def _said(epoch: Epoch) -> str:
    total, open_ = sum(epoch.gates), round(len(epoch.gates) * UNDECIDED[1])
    return (
        f"Epoch {epoch.epoch}: of {total:,} gates {sum(epoch.gates[open_:]):,} are open, "
        f"{undecided(epoch.gates):,} undecided"
    )


def _some(epochs: Sequence[Epoch]) -> list[Epoch]:
    """No more than can be shown, the last one among them."""
    every = max(1, ceil(len(epochs) / _COLUMNS))
    return list(epochs[::-every][::-1])
