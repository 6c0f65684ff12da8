"""A panel: curves over the steps of a training, with its phases behind them.

The names of phases above what they are the ground of: each is there, however narrow it is.

Phases of a training, and the steps at which the network was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.report.content import Training
from l0prune.report.page import elements
from l0prune.report.page.elements import drawing, element, is_narrow, text, titled

_LETTER, _GAP = 7.2, 10


@dataclass(frozen=True)
class Band:
    """A phase in a picture, from ``left`` to ``right``."""

    name: str
    left: float
    right: float


def band_names(bands: Sequence[Band], y: float, width: float) -> list[Markup]:
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


_LEAST = 1e-6  # what is no rounding of a share


@dataclass(frozen=True)
class Span:
    """A phase, from step to step."""

    name: str
    start: float
    stop: float


def spans(training: Training) -> list[Span]:
    """The phases of a training with gates, as far as they are known."""
    if training.steps is None or training.warmup is None or training.settle is None:
        return []
    ends = (0, training.warmup, training.steps - training.settle, training.steps)
    names = ("warm-up", "prune", "settle")
    pairs = zip(names, ends, ends[1:], strict=False)
    return [Span(name, start, stop) for name, start, stop in pairs if stop > start]


def in_words(training: Training) -> str:
    """Up to which step each phase goes, and what the gates do in it."""
    steps = {span.name: f"{span.name} (to step {span.stop:,.0f})" for span in spans(training)}
    settle, learning, said = steps.pop("settle", ""), " and ".join(steps.values()), []
    if learning:
        said.append(f"Gates learn in {learning}.")
    if settle:
        has_budget = any(epoch.budgets for epoch in training.epochs)
        by_budget = "open as far as the budgets go, the likeliest first"
        rule = by_budget if has_budget else "open where their value without noise is above 0"
        said.append(
            f"In {settle} all gates stand, undecided ones too: {rule}, else closed. "
            "The weights learn on."
        )
    return " ".join(said)


def last_step(training: Training) -> float:
    """Return the last step."""
    return float(training.steps or training.epochs[-1].step)


@dataclass(frozen=True)
class Cut:
    """The epoch in which the network was made smaller while it trained.

    Attributes:
        start, stop: its steps.
        share: of their MACs, over those that they have at the network's whole size.
    """

    start: float
    stop: float
    share: float


def cuts(training: Training) -> list[Cut]:
    """Return the steps at which the network was cut, as far as recorded."""
    found, size, start = [], 1.0, 0.0
    for epoch, share in zip(training.epochs, step_shares(training), strict=True):
        if share is not None and share < size - _LEAST:
            found.append(Cut(start, float(epoch.step), share))
            size = share
        start = float(epoch.step)
    return found


def step_shares(training: Training) -> list[float | None]:
    """The share of its MACs that the network had in the steps of each epoch, where recorded."""
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


Point = tuple[float, float]
Place = Callable[[Point], Point]

_TITLE, _LINE, _PLOT, _BOTTOM, _LEFT, _RIGHT = 22, 17, 130, 24, 52, 8
_DASHES = (None, "6 4", "1.5 4", "10 3 2 3")  # what tells curves apart without colour


@dataclass(frozen=True)
class Curve:
    """A line of a panel: its name, and its points by step."""

    name: str
    points: tuple[Point, ...]


def panel(
    title: str,
    curves: Sequence[Curve],
    training: Training,
    width: int,
    *,
    marks: Sequence[float] = (),
    from_zero: bool = False,
) -> Markup:
    """The picture.

    Args:
        title: what is drawn, with its unit.
        curves: at most four, of which one has a point at least.
        training: whose steps and phases they go over.
        width: of the picture.
        marks: steps at which something was said; they are numbered from 1.
        from_zero: whether the scale has to begin at 0.
    """
    values = [y for curve in curves for _, y in curve.points]
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    if high == low:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
    end, phases = last_step(training), spans(training)
    top = _TITLE + _LINE * (len(curves) > 1) + _LINE * bool(phases)
    floor = float(top + _PLOT)

    def at(point: Point) -> Point:
        x = _LEFT + (width - _LEFT - _RIGHT) * point[0] / end
        return x, floor - _PLOT * (point[1] - low) / (high - low)

    drawn = [
        *_phases(phases, at, low, high, width),
        *(_cut(cut, at, low, high) for cut in cuts(training)),
        *_grid(low, high, end, at, width),
        *_legend(title, curves),
        *(_line(curve, number, at) for number, curve in enumerate(curves)),
        *_marks(marks, at, high),
    ]
    said = "; ".join(_said(curve) for curve in curves if curve.points)
    return drawing(width, floor + _BOTTOM, f"{title}: {said}", *drawn)


def _said(curve: Curve) -> str:
    first, last = curve.points[0][1], curve.points[-1][1]
    return f"{curve.name} from {elements.tick(first)} to {elements.tick(last)}"


def _phases(
    phases: Sequence[Span], at: Place, low: float, high: float, width: float
) -> Iterator[Markup]:
    found = []
    for span in phases:
        (left, floor), (right, top) = at((span.start, low)), at((span.stop, high))
        found.append(Band(span.name, left, right))
    labels = band_names(found, top - 9, width) if found else []
    for number, (span, band, name) in enumerate(zip(phases, found, labels, strict=True)):
        size = {"width": band.right - band.left, "height": floor - top}
        shade = element("rect", x=band.left, y=top, class_=f"phase{number % 2}", **size)
        yield titled(f"{span.name}: steps {span.start:g} to {span.stop:g}", shade, name)


def _cut(cut: Cut, at: Place, low: float, high: float) -> Markup:
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
        drawn.append(element("line", x1=x, x2=x + 24, y1=y, y2=y, **_look(number)))
        drawn.append(text(x + 29, y + 4, curve.name, class_="tick"))
        x += 29 + 6.6 * len(curve.name) + 18
    return drawn


def _line(curve: Curve, number: int, at: Place) -> Markup:
    places = [at(point) for point in curve.points]
    if len(places) == 1:
        x, y = places[0]
        return element("circle", cx=x, cy=y, r=3, class_=f"point c{number}")
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return titled(_said(curve), element("polyline", points=points, **_look(number)))


def _look(number: int) -> dict[str, str | None]:
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
