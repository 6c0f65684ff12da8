"""A panel: curves over the steps of a training, with its phases behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.report.content import Training
from l0prune.report.page import bands, numbers
from l0prune.report.page.bands import Band
from l0prune.report.page.elements import drawing, element, is_narrow, text, titled
from l0prune.report.page.phases import Cut, Span, cuts, last_step, spans

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
    return f"{curve.name} from {numbers.tick(first)} to {numbers.tick(last)}"


def _phases(
    phases: Sequence[Span], at: Place, low: float, high: float, width: float
) -> Iterator[Markup]:
    found = []
    for span in phases:
        (left, floor), (right, top) = at((span.start, low)), at((span.stop, high))
        found.append(Band(span.name, left, right))
    names = bands.names(found, top - 9, width) if found else []
    for number, (span, band, name) in enumerate(zip(phases, found, names, strict=True)):
        size = {"width": band.right - band.left, "height": floor - top}
        shade = element("rect", x=band.left, y=top, class_=f"phase{number % 2}", **size)
        yield titled(f"{span.name}: steps {span.start:g} to {span.stop:g}", shade, name)


def _cut(cut: Cut, at: Place, low: float, high: float) -> Markup:
    (x, floor), (_, top) = at((cut.start, low)), at((cut.start, high))
    line = element("line", x1=x, x2=x, y1=top, y2=floor, class_="cut")
    left = f"{numbers.percent(cut.share)} of the MACs of a step"
    said = f"The network was made smaller after step {cut.start:g}: {left}, up to step {cut.stop:g}"
    return titled(said, line)


def _grid(low: float, high: float, end: float, at: Place, width: float) -> list[Markup]:
    drawn = []
    for value in numbers.ticks(low, high):
        _, y = at((0.0, value))
        drawn.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(text(_LEFT - 6, y + 4, numbers.tick(value), class_="tick", text_anchor="end"))
    for step in numbers.ticks(0, end, 3 if is_narrow(width) else 6):
        x, floor = at((step, low))
        anchor = "end" if x > width - 40 else "middle"
        label = numbers.tick(step) if step else "step 0"
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
