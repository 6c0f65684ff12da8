"""Pictures of times: by layer as a waterfall, and predicted beside measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.features.page import elements
from l0prune.features.page.elements import column, drawing, element, is_narrow, short, text, titled
from l0prune.report.content import Content, Fit, OwnerTime, TimeByLayer
from l0prune.selection.fitted import Observation

_NO_MODULE = "the model’s own forward"  # operators that belong to no submodule
_SLIGHT = 0.002  # share of the whole time, up to which a change gets no bar
_MOST = 24  # bars at most, beside the first and the last


@dataclass(frozen=True)
class Step:
    """Bar of the waterfall, from ``before`` milliseconds to ``after``.

    Attributes:
        filling: milliseconds of the remaining time that only fill whole blocks.
    """

    name: str
    before: float
    after: float
    kind: str
    filling: float = 0.0


def time_by_layer(time: TimeByLayer, width: int) -> Markup:
    """Draw a waterfall from the time of the dense network down to that of the small one."""
    steps, narrow = steps_of(by_block(time.owners)), is_narrow(width)
    row = 38 if narrow else 26
    label, right = (0, 0) if narrow else (column(step.name for step in steps), 115)
    most = max(max(step.before, step.after) for step in steps) or 1.0

    def at(ms: float) -> float:
        return label + (width - label - right) * ms / most

    drawn = []
    for number, step in enumerate(steps):
        y = row * number
        said = _said(step)
        low, high = sorted((at(step.before), at(step.after)))
        line, bar_y = (y + 14, y + 20) if narrow else (y + 17, y + 6)
        size = {"width": max(high - low, 1.0), "height": 13}
        drawn.append(
            titled(
                f"{step.name}: {said}{_filled(step)}",
                text(0, line, short(step.name, 30 if narrow else 44), class_="label"),
                text(width, line, said, class_="value", text_anchor="end"),
                element("rect", x=low, y=bar_y, rx=2, class_=step.kind, **size),
                *_filling(step, at, bar_y),
            )
        )
    first, last = (elements.milliseconds(steps[at].after) for at in (0, -1))
    said = f"From {first} to {last}"
    return drawing(width, row * len(steps) + 4, f"{said}, by layer", *drawn)


def by_block(owners: Sequence[OwnerTime]) -> list[OwnerTime]:
    """Return modules in network order, merged into blocks if there are too many to show."""
    depth = max(of.name.count(".") + 1 for of in owners)
    while depth and len({_block(of.name, depth) for of in owners}) > _MOST:
        depth -= 1
    if not depth:  # a flat model of many modules
        ranked = sorted(owners, key=lambda of: of.after - of.before)
        shown = {id(of) for of in ranked[: _MOST - 1]}
        names = [of.name if id(of) in shown else "all others" for of in owners]
    else:
        names = [_block(of.name, depth) for of in owners]
    blocks: dict[str, list[OwnerTime]] = {}
    for name, of in zip(names, owners, strict=True):
        blocks.setdefault(name, []).append(of)
    return [_summed(name, members) for name, members in blocks.items()]


def _summed(name: str, owners: Sequence[OwnerTime]) -> OwnerTime:
    return OwnerTime(
        name=name,
        before=sum(of.before for of in owners),
        after=sum(of.after for of in owners),
        filling=sum(of.filling for of in owners),
    )


def _block(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth]) or _NO_MODULE


def steps_of(owners: Sequence[OwnerTime]) -> list[Step]:
    """Return the bars: the dense network's time, the change of each owner, the remaining time."""
    total = sum(of.before for of in owners)
    changed = [of for of in owners if abs(of.after - of.before) > _SLIGHT * total]
    if rest := [of for of in owners if of not in changed]:
        changed.append(_summed(f"{len(rest)} that hardly changed", rest))
    steps = [Step("dense network", 0.0, total, "was")]
    for of in changed:
        change = of.after - of.before
        kind = "saved" if change <= 0 else "lost"
        steps.append(Step(of.name, total, total + change, kind, of.filling))
        total += change
    filling = sum(of.filling for of in owners)
    return [*steps, Step("small network", 0.0, total, "kept", filling)]


def _filling(step: Step, at: Callable[[float], float], y: float) -> list[Markup]:
    """Draw the part of a bar that only fills whole blocks."""
    low, high = at(max(step.after - step.filling, 0.0)), at(step.after)
    if high - low < 1:
        return []
    size = {"width": high - low, "height": 13}
    return [element("rect", x=low, y=y, rx=2, class_="filling", **size)]


def _filled(step: Step) -> str:
    if not step.filling:
        return ""
    return f"; {elements.milliseconds(step.filling)} of what is left only fill whole blocks"


def _said(step: Step) -> str:
    if step.kind in ("was", "kept"):
        return elements.milliseconds(step.after)
    change = step.after - step.before
    sign = "−" if change < 0 else "+" if change else ""
    return sign + elements.milliseconds(abs(change))


_TOP, _BOTTOM, _MARGIN = 30, 26, 0.04

Place = Callable[[float], float]


@dataclass(frozen=True)
class Row:
    """Row of one network, with times as shares of the dense network's."""

    name: str
    predicted: float
    observed: float

    @property
    def said(self) -> str:
        """Predicted and measured share, in words."""
        return f"{elements.percent(self.predicted)} → {elements.percent(self.observed)}"


@dataclass(frozen=True)
class Group:
    """Networks of one picture, and the share that the budget allows, if there is one."""

    title: str
    rows: tuple[Row, ...]
    allowed: float | None = None


def groups_of(content: Content) -> list[Group]:
    """Return the timed networks of each budget, stage by stage, and the table's prediction."""
    fits = [("", content.fit), *((training.name, training.fit) for training in content.trainings)]
    found = [group for name, fit in fits if fit is not None for group in _of_fit(name, fit)]
    return [*found, *_of_table(content)]


def _of_fit(stage: str, fit: Fit) -> Iterator[Group]:
    for budget in dict.fromkeys(trial.budget for trial in fit.looks):
        trials = [trial for trial in fit.looks if trial.budget == budget]
        rows = tuple(_row(number, trial) for number, trial in enumerate(trials, start=1))
        title = f"Widths for {budget}" + (f", {stage}" if stage else "")
        yield Group(title, rows, trials[0].allowed / trials[0].dense)


def _row(number: int, trial: Observation) -> Row:
    taken = ", taken" if trial.chosen else ""
    predicted, observed = trial.predicted / trial.dense, trial.observed / trial.dense
    return Row(f"choice {number}{taken}", predicted, observed)


def _of_table(content: Content) -> Iterator[Group]:
    time = content.time
    if time is None or not time.measured:
        return
    rows = [Row("dense network", time.before / time.measured, 1.0)]
    if time.timed is not None:
        rows.append(Row("exported file", time.after / time.measured, time.timed))
    yield Group("The latency table", tuple(rows))


def predicted_and_measured(group: Group, width: int) -> Markup:
    """Draw a row for each network: its predicted time beside the measured one."""
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
    for percent in elements.ticks(100 * low, 100 * high, 5):
        x = at(percent / 100)
        drawn.append(element("line", x1=x, x2=x, y1=_TOP, y2=floor, class_="grid"))
        label = f"{elements.tick(percent)} %"
        drawn.append(text(x, floor + 18, label, class_="tick", text_anchor="middle"))
    return drawn


def _limit(group: Group, at: Place, y: float) -> list[Markup]:
    if group.allowed is None:
        return []
    x = at(group.allowed)
    line = element("line", x1=x, x2=x, y1=y - 9, y2=y + 9, class_="limit")
    return [titled(f"the budget allows {elements.percent(group.allowed)}", line)]


def _dots(row: Row, at: Place, y: float) -> Sequence[Markup]:
    predicted, observed = at(row.predicted), at(row.observed)
    return (
        element("line", x1=predicted, x2=observed, y1=y, y2=y, class_="rule"),
        element("circle", cx=predicted, cy=y, r=5, class_="hollow"),
        element("circle", cx=observed, cy=y, r=5, class_="dot"),
    )
