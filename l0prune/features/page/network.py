"""Picture of the network: a bar per layer, as wide as before the cut, filled as after it.

Also the sums at the foot of the table of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from markupsafe import Markup

from l0prune.features.page import elements
from l0prune.features.page.elements import (
    clipped,
    column,
    drawing,
    element,
    is_narrow,
    short,
    text,
    titled,
)
from l0prune.report.content import Axis, Content, LayerChange, Pair, SideChange

_LANE, _MOST_LANES = 9, 6
_VALUE = 115  # width of the column behind the bars
_LETTER = 6.2  # width of a letter of a reason
_SHORTEST = 10.0


@dataclass(frozen=True)
class Row:
    """Bar: the output side of a layer, or an input side with an axis that no layer writes."""

    name: str
    kind: str
    side: SideChange
    is_survey: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether nothing was cut; in a survey, whether nothing can be."""
        return self.side.after == (0 if self.is_survey else self.side.before)

    @property
    def is_gone(self) -> bool:
        """Return whether the whole side was removed."""
        return not self.is_survey and self.side.after == 0

    @property
    def widths(self) -> str:
        """Return the widths before and after; in a survey, the share that can be removed."""
        return elements.change(self.side.before, self.side.after, is_survey=self.is_survey)


def network(
    layers: Sequence[LayerChange], axes: Sequence[Axis], width: int, *, is_survey: bool = False
) -> Markup:
    """Draw layers as bars, whose length is proportional to the square root of the width.

    In a survey ``after`` is the number that can be removed, not that which is left.
    """
    rows, narrow = rows_of(layers, is_survey), is_narrow(width)
    lanes = _lanes(rows)
    height_of_row = 36 if narrow else 24
    left = 8 + _LANE * (1 + max(lanes.values(), default=0)) if lanes else 0
    start, end = (
        left + (0 if narrow else column(row.name for row in rows)),
        width - (0 if narrow else _VALUE),
    )
    widest = max(row.side.before for row in rows)
    drawn = []
    for number, row in enumerate(rows):
        y = height_of_row * number
        full = max(_SHORTEST, (end - start) * sqrt(row.side.before / widest))
        draw = _narrow if narrow else _wide
        drawn.append(draw(row, y, left, start, full, width))
    ties = [_tie(axes, rows, axis, lane, height_of_row) for axis, lane in lanes.items()]
    cut = sum(not row.is_whole for row in rows)
    done = "can be" if is_survey else "were"
    said = f"{len(layers)} layers in network order; {cut} of {len(rows)} bars {done} cut"
    return drawing(width, height_of_row * len(rows) + 4, said, *ties, *drawn)


def rows_of(layers: Sequence[LayerChange], is_survey: bool = False) -> list[Row]:
    """Return the bars in network order."""
    written = {axis for layer in layers for axis in layer.output.axes}
    rows = []
    for layer in layers:
        if any(axis not in written for axis in layer.input.axes):
            rows.append(Row(f"{layer.name} (inputs)", layer.kind, layer.input, is_survey))
        rows.append(Row(layer.name, layer.kind, layer.output, is_survey))
    return rows


def flattened(layers: Sequence[LayerChange], axes: Sequence[Axis]) -> list[str]:
    """Return layers that read flattened maps with gates on single positions and on whole maps."""
    fine = {number for number, axis in enumerate(axes) if axis.kind == "input"}
    sides = {layer.name: set(layer.input.axes) for layer in layers}
    return [name for name, read in sides.items() if read & fine and read - fine]


def said_of(row: Row) -> str:
    """Describe a bar in words."""
    side = row.side
    reason = f"{'; ' if row.is_gone else '; stays whole: '}{side.reason}" if side.reason else ""
    return f"{row.name}, {row.kind}: {row.widths}{reason}"


def _wide(row: Row, y: float, left: float, start: float, full: float, width: float) -> Markup:
    return titled(
        said_of(row),
        text(left, y + 16, short(row.name, 44), class_="label"),
        *_bar(row, start, y + 6, full, 14),
        *_reason(row, start, y + 16.5, full, width - _VALUE),
        text(width, y + 16.5, row.widths, class_="value", text_anchor="end"),
    )


def _reason(row: Row, start: float, y: float, full: float, end: float) -> list[Markup]:
    """Draw why a bar is whole or removed, beside or on the bar, where there is more room."""
    if not (row.is_whole or row.is_gone) or not row.side.reason:
        return []
    beside, on = end - start - full - 8, full - 12
    x, room = (start + full + 8, beside) if beside >= on else (start + 6, on)
    kind = "aside" if beside >= on else "on"
    return [text(x, y, clipped(row.side.reason, int(room / _LETTER)), class_=kind)]


def _narrow(row: Row, y: float, left: float, start: float, full: float, width: float) -> Markup:
    return titled(
        said_of(row),
        text(left, y + 13, short(row.name, 30), class_="label"),
        text(width, y + 13, row.widths, class_="value", text_anchor="end"),
        *_bar(row, start, y + 19, full, 10),
    )


def _bar(row: Row, x: float, y: float, full: float, height: float) -> list[Markup]:
    side = row.side
    is_pinned = row.is_whole and bool(side.reason)
    filled = full if is_pinned else full * side.after / max(side.before, 1)
    kind = "whole" if is_pinned else "kept"
    return [
        element("rect", x=x, y=y, width=full, height=height, rx=2, class_="was"),
        element("rect", x=x, y=y, width=filled, height=height, rx=2, class_=kind),
    ]


def _members(rows: Sequence[Row]) -> dict[int, list[int]]:
    """Return for each axis on several bars the indices of these bars."""
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        for axis in dict.fromkeys(row.side.axes):
            found.setdefault(axis, []).append(number)
    return {axis: numbers for axis, numbers in found.items() if len(numbers) > 1}


def _lanes(rows: Sequence[Row]) -> dict[int, int]:
    """Return for each axis on several bars a lane beside them, without overlaps, if one is free."""
    lanes: dict[int, int] = {}
    ends: list[int] = []
    for axis, members in sorted(_members(rows).items(), key=lambda each: each[1][0]):
        lane = next((n for n, end in enumerate(ends) if end < members[0]), len(ends))
        if lane == _MOST_LANES:
            continue
        ends[lane : lane + 1] = [members[-1]]
        lanes[axis] = lane
    return lanes


def _tie(axes: Sequence[Axis], rows: Sequence[Row], axis: int, lane: int, height: float) -> Markup:
    members, x = _members(rows)[axis], 4 + _LANE * lane
    middle = 12.5 if height < 30 else 13.0
    name = axes[axis].name if axis < len(axes) else str(axis)
    ys = [height * number + middle for number in members]
    return titled(
        f"{len(members)} layers share the axis {name}",
        element("line", x1=x, x2=x, y1=ys[0], y2=ys[-1], class_="tie"),
        *(element("circle", cx=x, cy=y, r=2.5, class_="knot") for y in ys),
    )


def heads(axes: Sequence[Axis], width: int) -> Markup:
    """Draw attention heads as grids of squares, filled for those that were kept."""
    side, gap = 12, 4
    names, narrow = [axis.name.removesuffix(".heads") for axis in axes], is_narrow(width)
    label = 0 if narrow else column(names)
    columns = int((width - label - 80) // (side + gap))
    drawn, y = [], 4.0
    for axis, name in zip(axes, names, strict=True):
        kept = set(axis.kept or ())
        shown = min(axis.before, 512)
        said = f"{axis.after} of {axis.before}"
        top, rows = y + (18 if narrow else 0), -(-shown // columns)
        squares = [
            element(
                "rect",
                x=label + (side + gap) * (slot % columns),
                y=top + (side + gap) * (slot // columns),
                width=side,
                height=side,
                rx=2,
                class_="kept" if slot in kept else "was",
            )
            for slot in range(shown)
        ]
        end = label + (side + gap) * min(shown, columns) + 6
        drawn.append(
            titled(
                f"{axis.name}: {said} heads",
                text(0, y + 10, short(name, 44), class_="label"),
                text(end, top + 10, said, class_="value"),
                *squares,
            )
        )
        y = top + (side + gap) * rows + 8
    return drawing(width, y, f"Attention heads of {len(axes)} layers", *drawn)


REST, TOTAL = "outside these layers", "total"


@dataclass(frozen=True)
class Sum:
    """Sum in a row at the foot of the table."""

    name: str
    params: Pair
    macs: Pair


def sums(content: Content) -> list[Sum]:
    """Return the total of the network, after the part outside the layers, if there is any."""
    params, macs = content.gain.params, content.gain.macs
    if params is None or macs is None:
        return []
    total = Sum(TOTAL, params, macs)
    rest = Sum(
        REST,
        _without(params, [layer.params for layer in content.layers]),
        _without(macs, [layer.macs for layer in content.layers]),
    )
    amounts = [rest.params.before or 0, rest.params.after, rest.macs.before or 0, rest.macs.after]
    return [rest, total] if max(amounts) > 0 and min(amounts) >= 0 else [total]


def _without(all_: Pair, parts: Sequence[Pair]) -> Pair:
    before = (all_.before or 0) - sum(part.before or 0 for part in parts)
    return Pair(before=round(before), after=round(all_.after - sum(part.after for part in parts)))
