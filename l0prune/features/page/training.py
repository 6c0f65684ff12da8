"""Pictures of a training: curves over the steps, and the gates at the end of each epoch.

Both show the phases of the training in the background, with their names above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from markupsafe import Markup

from l0prune.features.page import elements
from l0prune.features.page.elements import drawing, element, is_narrow, text, titled
from l0prune.plan.measures import kind_of, names
from l0prune.report.content import Epoch, Training
from l0prune.training.history import IN_PERCENT

Point = tuple[float, float]
Place = Callable[[Point], Point]

UNDECIDED = (0.1, 0.9)  # range of P(z ≠ 0) in which a gate is neither open nor closed
_LEFT, _RIGHT = 52, 8
_TITLE, _LINE, _PLOT, _BOTTOM = 22, 17, 130, 24  # heights
_DASHES = (None, "6 4", "1.5 4", "10 3 2 3")  # distinguish curves without colour
_LETTER, _GAP = 7.2, 10  # widths in the names of phases
_ROUNDING = 1e-6  # error of a share
_COLUMNS = 60  # epochs that are shown, at most
_SHADES = 9
_CELL, _KEY = 7.0, 11


@dataclass(frozen=True)
class Span:
    """Phase of a training, from step ``start`` to ``stop``."""

    name: str
    start: float
    stop: float


def spans(training: Training) -> list[Span]:
    """Return the phases of a training with gates; empty if unknown."""
    if training.steps is None or training.warmup is None or training.settle is None:
        return []
    ends = (0, training.warmup, training.steps - training.settle, training.steps)
    names = ("warm-up", "prune", "settle")
    pairs = zip(names, ends, ends[1:], strict=False)
    return [Span(name, start, stop) for name, start, stop in pairs if stop > start]


def phases_in_words(training: Training) -> str:
    """Describe the last step of each phase, and the state of the gates in it."""
    steps = {span.name: f"{span.name} (to step {span.stop:,.0f})" for span in spans(training)}
    settle, learning, said = steps.pop("settle", ""), " and ".join(steps.values()), []
    if learning:
        said.append(f"Gates learn in {learning}.")
    if settle:
        has_budget = any(epoch.budgets for epoch in training.epochs)
        by_budget = "the most probable ones stay open, as many as the budgets allow"
        rule = by_budget if has_budget else "a gate is open if its value without noise is above 0"
        said.append(
            f"In {settle} all gates are fixed, undecided ones too: {rule}; the others are closed. "
            "The weights continue to learn."
        )
    return " ".join(said)


@dataclass(frozen=True)
class SizeCut:
    """Epoch in which the network in training was cut.

    Attributes:
        start, stop: steps of the epoch.
        share: MACs of these steps over those at the network's full size.
    """

    start: float
    stop: float
    share: float


def cuts(training: Training) -> list[SizeCut]:
    """Return the epochs in which the network was cut, as far as recorded."""
    found, size, start = [], 1.0, 0.0
    for epoch, share in zip(training.epochs, step_shares(training), strict=True):
        if share is not None and share < size - _ROUNDING:
            found.append(SizeCut(start, float(epoch.step), share))
            size = share
        start = float(epoch.step)
    return found


def step_shares(training: Training) -> list[float | None]:
    """Return for each epoch the share of the full network's MACs in its steps; None if unknown."""
    found: list[float | None] = []
    done, work = 0, 0.0
    for epoch in training.epochs:
        if epoch.training_macs is None or epoch.step <= done:
            found.append(None)
            continue
        total = epoch.training_macs * epoch.step
        found.append((total - work) / (epoch.step - done))
        done, work = epoch.step, total
    return found


def remarks(training: Training) -> list[tuple[float, str]]:
    """Return the doctor's remarks, each with its step."""
    return [(float(e.step), text) for e in training.epochs for text in e.doctor.values()]


@dataclass(frozen=True)
class Curve:
    """Curve of a panel: its name, and its points by step."""

    name: str
    points: tuple[Point, ...]


def curves(training: Training, width: int) -> list[Markup]:
    """Draw a panel for each recorded quantity."""
    epochs, found = training.epochs, []
    said = [step for step, _ in remarks(training)]
    losses = _recorded(
        training, train=[e.train_loss for e in epochs], test=[e.test_loss for e in epochs]
    )
    if losses:
        found.append(panel("Loss of the task", losses, training, width, marks=said))
    in_percent = training.metric in IN_PERCENT
    unit, name = 100 if in_percent else 1, training.metric
    metric = _recorded(training, **{name: [_times(unit, e.metric) for e in epochs]})
    if metric and name != "test_loss":
        title = f"{name.capitalize()} on the test data{', %' if in_percent else ''}"
        is_error = in_percent and not training.larger_is_better
        found.append(panel(title, metric, training, width, from_zero=is_error))
    for measure in dict.fromkeys(name for epoch in epochs for name in epoch.amounts):
        label = kind_of(measure).label if measure in names() else measure
        of = _cost_curves(training, measure)
        found.append(panel(f"{label}, % of the dense network’s", of, training, width))
    if cuts(training):
        title = "MACs of a training step, % of the whole network’s"
        of = _recorded(training, step=[_times(100, share) for share in step_shares(training)])
        found.append(panel(title, of, training, width))
    return found


def multipliers(training: Training, width: int) -> list[Markup]:
    """Draw a panel with the Lagrange multiplier of each budget."""
    epochs, found = training.epochs, []
    for budget in dict.fromkeys(asked for epoch in epochs for asked in epoch.budgets):
        states = [epoch.budgets.get(budget) for epoch in epochs]
        of = _recorded(training, λ=[None if s is None else s.multiplier for s in states])
        found.append(panel(f"Multiplier of {budget}", of, training, width))
    return found


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _cost_curves(training: Training, measure: str) -> list[Curve]:
    """Return the curves of a measure: expected, of an export, and the budget's target."""
    expected: list[float | None] = []
    actual: list[float | None] = []
    target: list[float | None] = []
    for epoch in training.epochs:
        of = epoch.amounts.get(measure)
        expected.append(100 * of.expected / of.dense if of and of.dense else None)
        actual.append(100 * of.actual / of.dense if of and of.dense else None)
        aims = [b.target for text, b in epoch.budgets.items() if text.startswith(f"{measure}=")]
        target.append(100 * aims[0] if aims else None)
    return _recorded(training, actual=actual, expected=expected, target=target)


def _recorded(training: Training, **series: Sequence[float | None]) -> list[Curve]:
    """Return the curves of the series with at least one value."""
    steps = [float(epoch.step) for epoch in training.epochs]
    found = []
    for name, values in series.items():
        known = zip(steps, values, strict=True)
        if points := tuple((step, value) for step, value in known if value is not None):
            found.append(Curve(name, points))
    return found


def panel(
    title: str,
    curves: Sequence[Curve],
    training: Training,
    width: int,
    *,
    marks: Sequence[float] = (),
    from_zero: bool = True,
) -> Markup:
    """Draw at most four curves over the steps of a training, with the phases in the background.

    ``marks`` are steps with remarks, numbered from 1. ``from_zero`` lets the scale begin at 0,
    unless values are below.
    """
    values = [y for curve in curves for _, y in curve.points]
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    if high == low:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
    end, phases = float(training.steps or training.epochs[-1].step), spans(training)
    top = _TITLE + _LINE * (len(curves) > 1) + _LINE * bool(phases)
    floor = float(top + _PLOT)

    def at(point: Point) -> Point:
        x = _LEFT + (width - _LEFT - _RIGHT) * point[0] / end
        return x, floor - _PLOT * (point[1] - low) / (high - low)

    drawn = [
        *_phase_bands(phases, at, low, high, width),
        *(_cut_line(cut, at, low, high) for cut in cuts(training)),
        *_grid(low, high, end, at, width),
        *_legend(title, curves),
        *(_line(curve, number, at) for number, curve in enumerate(curves)),
        *_marks(marks, at, high),
    ]
    said = "; ".join(_range_said(curve) for curve in curves if curve.points)
    return drawing(width, floor + _BOTTOM, f"{title}: {said}", *drawn)


def _range_said(curve: Curve) -> str:
    first, last = curve.points[0][1], curve.points[-1][1]
    return f"{curve.name} from {elements.tick(first)} to {elements.tick(last)}"


def _phase_bands(
    phases: Sequence[Span], at: Place, low: float, high: float, width: float
) -> Iterator[Markup]:
    found = []
    for span in phases:
        (left, floor), (right, top) = at((span.start, low)), at((span.stop, high))
        found.append(Band(span.name, left, right))
    labels = _band_names(found, top - 9, width) if found else []
    for number, (span, band, name) in enumerate(zip(phases, found, labels, strict=True)):
        size = {"width": band.right - band.left, "height": floor - top}
        shade = element("rect", x=band.left, y=top, class_=f"phase{number % 2}", **size)
        yield titled(f"{span.name}: steps {span.start:g} to {span.stop:g}", shade, name)


def _cut_line(cut: SizeCut, at: Place, low: float, high: float) -> Markup:
    (x, floor), (_, top) = at((cut.start, low)), at((cut.start, high))
    line = element("line", x1=x, x2=x, y1=top, y2=floor, class_="cut")
    left = f"{elements.percent(cut.share)} of the MACs of a step"
    said = f"The network was made smaller after step {cut.start:g}: {left}, up to step {cut.stop:g}"
    return titled(said, line)


def _grid(low: float, high: float, end: float, at: Place, width: float) -> list[Markup]:
    drawn = []
    for value in elements.ticks(low, high):
        _, y = at((0.0, value))
        drawn.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(text(_LEFT - 6, y + 4, elements.tick(value), class_="tick", text_anchor="end"))
    for step in elements.ticks(0, end, 3 if is_narrow(width) else 6):
        x, floor = at((step, low))
        anchor = "end" if x > width - 40 else "middle"
        label = elements.tick(step) if step else "step 0"
        drawn.append(text(x, floor + 18, label, class_="tick", text_anchor=anchor))
    return drawn


def _legend(title: str, curves: Sequence[Curve]) -> list[Markup]:
    drawn, x, y = [text(0, 13, title, class_="heading")], float(_LEFT), _TITLE + 6
    for number, curve in enumerate(curves if len(curves) > 1 else ()):
        drawn.append(element("line", x1=x, x2=x + 24, y1=y, y2=y, **_style(number)))
        drawn.append(text(x + 29, y + 4, curve.name, class_="tick"))
        x += 29 + 6.6 * len(curve.name) + 18
    return drawn


def _line(curve: Curve, number: int, at: Place) -> Markup:
    places = [at(point) for point in curve.points]
    if len(places) == 1:
        x, y = places[0]
        return element("circle", cx=x, cy=y, r=3, class_=f"point c{number}")
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return titled(_range_said(curve), element("polyline", points=points, **_style(number)))


def _style(number: int) -> dict[str, str | None]:
    """Return the style of the curve of this number."""
    return {"class_": f"curve c{number}", "stroke_dasharray": _DASHES[number]}


def _marks(steps: Sequence[float], at: Place, high: float) -> list[Markup]:
    drawn = []
    for number, step in enumerate(steps, start=1):
        x, y = at((step, high))
        drawn.append(
            titled(
                f"The doctor's remark {number}, at step {step:g}",
                element("circle", cx=x, cy=y, r=8, class_="remark"),
                text(x, y + 4, str(number), class_="number", text_anchor="middle"),
            )
        )
    return drawn


@dataclass(frozen=True)
class Band:
    """Phase in a picture, from ``left`` to ``right``."""

    name: str
    left: float
    right: float


def _band_names(bands: Sequence[Band], y: float, width: float) -> list[Markup]:
    """Draw the name of each band at its beginning.

    Names without enough room extend to the left for the first and last band, else to the right.
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


def undecided(counts: Sequence[int]) -> int:
    """Count the gates that are neither open nor closed, from counts by bin of P(z ≠ 0)."""
    bins = len(counts)
    low, high = (round(edge * bins) for edge in UNDECIDED)
    return sum(counts[low:high])


def gate_histogram(training: Training, width: int) -> Markup:
    """Draw the distribution of P(z ≠ 0) at the end of each epoch: the darker, the more gates."""
    counted = [epoch for epoch in training.epochs if epoch.gates]
    shown = counted[:: -ceil(len(counted) / _COLUMNS)][::-1]  # includes the last one
    narrow, phases = is_narrow(width), any(epoch.phase for epoch in shown)
    top = 28.0 + _LINE * (1 + narrow + phases)
    height = _CELL * len(shown[-1].gates)
    column = (width - _LEFT - _RIGHT) / len(shown)
    columns = [_column(e, _LEFT + column * n, column, top) for n, e in enumerate(shown)]
    drawn = [*_histogram_head(shown[-1], width, narrow), *columns]
    for share in (0.0, UNDECIDED[0], 0.5, UNDECIDED[1], 1.0):
        y, kind = top + height * (1 - share), "edge" if share in UNDECIDED else "grid"
        drawn.append(text(_LEFT - 6, y + 4, f"{share:g}", class_="tick", text_anchor="end"))
        drawn.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y, class_=kind))
    drawn += _phase_starts(shown, column, top, height, width)
    ends = {0: ("start", 0.0), len(shown) // 2: ("middle", 0.5), len(shown) - 1: ("end", 1.0)}
    for number, (anchor, part) in ends.items():
        x, label = _LEFT + column * (number + part), f"epoch {shown[number].epoch:,}"
        drawn.append(text(x, top + height + 18, label, class_="tick", text_anchor=anchor))
    return drawing(width, top + height + 26, _epoch_said(shown[-1]), *drawn)


def _histogram_head(last: Epoch, width: int, narrow: bool) -> list[Markup]:
    """Draw the title, the number of undecided gates, and the legend of the shades."""
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
    return titled(_epoch_said(epoch), *cells)


def _phase_starts(
    shown: Sequence[Epoch], column: float, top: float, height: float, width: float
) -> list[Markup]:
    """Draw the names of phases, and a line where each but the first begins."""
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
    return [*lines, *_band_names(found, top - 8, width)]


def _epoch_said(epoch: Epoch) -> str:
    total, open_ = sum(epoch.gates), round(len(epoch.gates) * UNDECIDED[1])
    return (
        f"Epoch {epoch.epoch}: of {total:,} gates {sum(epoch.gates[open_:]):,} are open, "
        f"{undecided(epoch.gates):,} undecided"
    )
