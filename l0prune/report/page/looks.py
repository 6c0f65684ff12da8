"""Predicted beside measured times: a row for each network that was timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.report.content import Content, Fit, Look
from l0prune.report.page import numbers
from l0prune.report.page.elements import column, drawing, element, is_narrow, text, titled

_TOP, _BOTTOM, _MARGIN = 30, 26, 0.04

Place = Callable[[float], float]


@dataclass(frozen=True)
class Row:
    """A network; its times are shares of the dense one's."""

    name: str
    predicted: float
    observed: float

    @property
    def said(self) -> str:
        """Both in words."""
        return f"{numbers.percent(self.predicted)} → {numbers.percent(self.observed)}"


@dataclass(frozen=True)
class Group:
    """The networks of one picture, and the share that a budget allows, if there is one."""

    title: str
    rows: tuple[Row, ...]
    allowed: float | None = None


def groups_of(content: Content) -> list[Group]:
    """Return the timed networks of each budget, stage by stage, and the table's prediction."""
    fits = [("", content.fit), *((training.name, training.fit) for training in content.trainings)]
    found = [group for name, fit in fits if fit is not None for group in _of_fit(name, fit)]
    return [*found, *_of_table(content)]


def _of_fit(stage: str, fit: Fit) -> Iterator[Group]:
    for budget in dict.fromkeys(look.budget for look in fit.looks):
        looks = [look for look in fit.looks if look.budget == budget]
        rows = tuple(_row(number, look) for number, look in enumerate(looks, start=1))
        title = f"Widths for {budget}" + (f", {stage}" if stage else "")
        yield Group(title, rows, looks[0].allowed / looks[0].dense)


def _row(number: int, look: Look) -> Row:
    taken = ", taken" if look.chosen else ""
    predicted, observed = look.predicted / look.dense, look.observed / look.dense
    return Row(f"choice {number}{taken}", predicted, observed)


def _of_table(content: Content) -> Iterator[Group]:
    time = content.time
    if time is None or not time.measured:
        return
    rows = [Row("dense network", time.before / time.measured, 1.0)]
    if time.timed is not None:
        rows.append(Row("exported file", time.after / time.measured, time.timed))
    yield Group("The latency table", tuple(rows))


def looks(group: Group, width: int) -> Markup:
    """The picture.

    Args:
        group: with one row at least.
        width: of the picture.
    """
    narrow, rows = is_narrow(width), group.rows
    left, right = (8, width - 8) if narrow else (column(r.name for r in rows) + 8, width - 140)
    height = 40 if narrow else 28
    values = [value for row in rows for value in (row.predicted, row.observed)]
    values += [group.allowed] if group.allowed is not None else []
    low, high = max(0.0, min(values) - _MARGIN), max(values) + _MARGIN

    def at(share: float) -> float:
        return left + (right - left) * (share - low) / (high - low)

    floor = _TOP + height * len(rows)
    drawn = [text(0, 13, group.title, class_="heading"), *_axis(low, high, at, floor)]
    for number, row in enumerate(rows):
        y = _TOP + height * (number + 0.5)
        line, dots = (y - 7, y + 8) if narrow else (y + 4, y)
        drawn.append(
            titled(
                f"{row.name}: {row.said} of the dense network’s",
                text(0, line, row.name, class_="label"),
                text(width, line, row.said, class_="value", text_anchor="end"),
                *_limit(group, at, dots),
                *_dots(row, at, dots),
            )
        )
    said = "; ".join(f"{row.name} {row.said}" for row in rows)
    return drawing(width, floor + _BOTTOM, f"{group.title}, predicted → timed: {said}", *drawn)


def _axis(low: float, high: float, at: Place, floor: float) -> list[Markup]:
    drawn = []
    for percent in numbers.ticks(100 * low, 100 * high, 5):
        x = at(percent / 100)
        drawn.append(element("line", x1=x, x2=x, y1=_TOP, y2=floor, class_="grid"))
        label = f"{numbers.tick(percent)} %"
        drawn.append(text(x, floor + 18, label, class_="tick", text_anchor="middle"))
    return drawn


def _limit(group: Group, at: Place, y: float) -> list[Markup]:
    if group.allowed is None:
        return []
    x = at(group.allowed)
    line = element("line", x1=x, x2=x, y1=y - 9, y2=y + 9, class_="limit")
    return [titled(f"the budget allows {numbers.percent(group.allowed)}", line)]


def _dots(row: Row, at: Place, y: float) -> Sequence[Markup]:
    predicted, observed = at(row.predicted), at(row.observed)
    return (
        element("line", x1=predicted, x2=observed, y1=y, y2=y, class_="rule"),
        element("circle", cx=predicted, cy=y, r=5, class_="hollow"),
        element("circle", cx=observed, cy=y, r=5, class_="dot"),
    )
