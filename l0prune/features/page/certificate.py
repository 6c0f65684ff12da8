"""Picture of the certificate: errors as dots on a log scale, beside their tolerance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

from l0prune.features.page import elements
from l0prune.features.page.elements import drawing, element, is_narrow, short, text, titled
from l0prune.report.content import Comparison

Scale = Callable[[float], float]

_TOP, _BOTTOM = 12, 34
_ROW, _HEADING, _OUTPUT = 40, 34, 28  # heights
_INDENT = 14
_MOST_OUTPUTS = 8  # rows at most for the outputs of one kind of comparison
_SMALLEST = 1e-17  # position of differences of 0
WHAT = {
    "graph": "captured graph",
    "class": "own class",
    "program": "exported program",
    "onnx": "ONNX file",
    "executorch": "ExecuTorch program",
    "openvino": "ONNX file in OpenVINO",
    "litert": "LiteRT program",
    "source": "ONNX file that came in",
}


@dataclass(frozen=True)
class Row:
    """Row of the picture; without errors a heading of the rows below.

    Attributes:
        name: kind of comparison; below a heading, the output.
        errors: errors, a dot for each.
        allowed: the largest tolerance.
        batches: sizes of the batches.
        heading: heading above the row; empty if there is none.
    """

    name: str
    errors: tuple[float, ...] = ()
    allowed: float = 0.0
    batches: tuple[int, ...] = ()
    heading: str = ""

    def height(self, width: float) -> float:
        """Return the height of the row in a picture of this width, in pixels."""
        if not self.errors:
            return _HEADING
        return _OUTPUT if self.heading and not is_narrow(width) else _ROW

    @property
    def said(self) -> str:
        """Largest error and tolerance, in words."""
        return f"{elements.error(max(self.errors))}, allowed {elements.error(self.allowed)}"


def certificate(checks: Sequence[Comparison], width: int) -> Markup:
    """Draw comparisons in a picture of this width."""
    rows = rows_of(checks)
    left, right = (8, width - 12) if is_narrow(width) else (258, width - 190)
    low = floor(log10(min(_shown(error) for row in rows for error in row.errors)))
    high = ceil(log10(max(max(c.tolerance, c.error) for c in checks))) + 0.5
    floor_ = _TOP + sum(row.height(width) for row in rows)

    def at(value: float) -> float:
        return left + (right - left) * (log10(_shown(value)) - low) / (high - low)

    drawn, y = [_axis(low, floor(high), at, floor_)], float(_TOP)
    for row in rows:
        drawn.append(_drawn(row, y + row.height(width) / 2, at, left, right, width))
        y += row.height(width)
    passed = all(check.passed for check in checks)
    said = "all within their tolerance" if passed else "not all within their tolerance"
    return drawing(width, floor_ + _BOTTOM, f"{len(checks)} comparisons, {said}", *drawn)


def grouped(checks: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Group comparisons by the name of their kind."""
    found: dict[str, list[Comparison]] = {}
    for check in checks:
        of = f"{check.part}: " if check.part else ""
        beside = " beside the module" if check.against == "module" else ""
        name = f"{of}{WHAT.get(check.what, check.what)}{beside}, {check.dtype}"
        found.setdefault(name, []).append(check)
    return found


def rows_of(checks: Sequence[Comparison]) -> list[Row]:
    """Return a row for each kind of comparison; with outputs by name, a heading and their rows."""
    return [row for name, alike in grouped(checks).items() for row in _rows(name, alike)]


def _rows(name: str, alike: Sequence[Comparison]) -> Iterator[Row]:
    allowed = max(check.tolerance for check in alike)
    batches = tuple(sorted({check.batch for check in alike}))
    errors: dict[str, list[float]] = defaultdict(list)
    for check in alike:
        for output, error in check.outputs.items():
            errors[output].append(error)
    if not errors:
        yield Row(name, tuple(check.error for check in alike), allowed, batches)
        return
    yield Row(f"{name}, {len(errors)} outputs")
    for output, of in _shortened(errors).items():
        yield Row(output, tuple(of), allowed, batches, name)


def _shortened(errors: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return errors by output: those that differ most, and all others together as one."""
    if len(errors) <= _MOST_OUTPUTS:
        return errors
    worst = sorted(errors, key=lambda name: -max(errors[name]))[: _MOST_OUTPUTS - 1]
    others = [error for name, of in errors.items() if name not in worst for error in of]
    shown = {name: of for name, of in errors.items() if name in worst}
    return {**shown, f"{len(errors) - len(worst)} others, which differ less": others}


def _shown(value: float) -> float:
    return max(value, _SMALLEST)


def _axis(low: int, high: int, at: Scale, y: float) -> Markup:
    every = max(1, (high - low) // 5)
    marks = []
    for power in range(low, high + 1, every):
        x = at(10.0**power)
        marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=y, class_="grid"))
        marks.append(text(max(x, 20), y + 18, f"1e{power}", class_="tick", text_anchor="middle"))
    return element("g", *marks)


def _drawn(row: Row, y: float, at: Scale, left: float, right: float, width: int) -> Markup:
    indent = _INDENT if row.heading else 0
    if not row.errors:
        return text(0, y + 4, short(row.name, 44 if is_narrow(width) else 120), class_="label")
    line, y = (y - 9, y + 6) if is_narrow(width) else (y + 4, y)
    limit = at(row.allowed)
    dots = [element("circle", cx=at(each), cy=y, r=4, class_="dot") for each in row.errors]
    name = f"{row.heading}, {row.name}" if row.heading else row.name
    return titled(
        f"{name}: {row.said}, batches of {', '.join(map(str, row.batches))}",
        text(indent, line, short(row.name, 24 if is_narrow(width) else 32), class_="label"),
        text(width, line, row.said, class_="value", text_anchor="end"),
        element("line", x1=left, x2=right, y1=y, y2=y, class_="rule"),
        element("line", x1=limit, x2=limit, y1=y - 8, y2=y + 8, class_="limit"),
        *dots,
    )
