"""The certificate as a picture: each comparison a dot, on a log scale, beside its tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log10

from markupsafe import Markup

from l0prune.report.content import Comparison
from l0prune.report.page import numbers
from l0prune.report.page.elements import drawing, element, is_narrow, short, text, titled

Scale = Callable[[float], float]

_ROW, _TOP, _BOTTOM = 40, 12, 34
_SMALLEST = 1e-17  # differences of 0 are shown there
WHAT = {
    "dense": "sliced graph",
    "class": "own class",
    "program": "exported program",
    "onnx": "ONNX file",
}


def certificate(checks: Sequence[Comparison], width: int) -> Markup:
    """The picture.

    Args:
        checks: at least one.
        width: of the picture.
    """
    rows = list(grouped(checks).items())
    left, right = (8, width - 12) if is_narrow(width) else (258, width - 150)
    low = floor(log10(max(_SMALLEST, min(_shown(c.error) for c in checks))))
    high = ceil(log10(max(max(c.tolerance, c.error) for c in checks))) + 0.5
    height = _TOP + _ROW * len(rows) + _BOTTOM

    def at(value: float) -> float:
        return left + (right - left) * (log10(_shown(value)) - low) / (high - low)

    drawn = [_axis(low, floor(high), at, height - _BOTTOM)]
    for number, (name, alike) in enumerate(rows):
        drawn.append(_row(name, alike, _TOP + _ROW * (number + 0.5), at, left, right, width))
    passed = all(check.passed for check in checks)
    said = "all within their tolerance" if passed else "not all within their tolerance"
    return drawing(width, height, f"{len(checks)} comparisons, {said}", *drawn)


def grouped(checks: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons of one kind together, under what they are called."""
    found: dict[str, list[Comparison]] = {}
    for check in checks:
        of = f" of {check.part}" if check.part else ""
        name = f"{WHAT.get(check.what, check.what)}{of}, {check.dtype}"
        found.setdefault(name, []).append(check)
    return found


def _shown(value: float) -> float:
    return max(value, _SMALLEST)


def _axis(low: int, high: int, at: Scale, y: float) -> Markup:
    every = max(1, (high - low) // 5)
    marks = []
    for power in range(low, high + 1, every):
        x = at(10.0**power)
        marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=y, class_="grid"))
        marks.append(text(max(x, 16), y + 18, f"1e{power}", class_="tick", text_anchor="middle"))
    return element("g", *marks)


def _row(
    name: str,
    alike: Sequence[Comparison],
    y: float,
    at: Scale,
    left: float,
    right: float,
    width: int,
) -> Markup:
    allowed = max(check.tolerance for check in alike)
    worst = max(check.error for check in alike)
    batches = ", ".join(map(str, sorted({check.batch for check in alike})))
    said = f"{numbers.error(worst)} of {numbers.error(allowed)}"
    line, y = (y - 9, y + 6) if is_narrow(width) else (y + 4, y)
    limit = at(allowed)
    dots = [element("circle", cx=at(c.error), cy=y, r=4, class_="dot") for c in alike]
    return titled(
        f"{name}: {said}, batches of {batches}",
        text(0, line, short(name, 34), class_="label"),
        text(width, line, said, class_="value", text_anchor="end"),
        element("line", x1=left, x2=right, y1=y, y2=y, class_="rule"),
        element("line", x1=limit, x2=limit, y1=y - 8, y2=y + 8, class_="limit"),
        *dots,
    )
