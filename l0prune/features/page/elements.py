"""Elements of SVG and HTML as escaped text, and numbers formatted for reading."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose, log10

from markupsafe import Markup, escape

from l0prune.plan.numbers import LARGE, in_thousands
from l0prune.training.history import IN_PERCENT

Attribute = str | int | float | None

_ELLIPSIS = "…"
_NARROW = 600


def element(name: str, *children: str, **attributes: Attribute) -> Markup:
    """Return ``<name attribute="…">children</name>``.

    Args:
        name: name of the element.
        *children: elements, or text.
        **attributes: ``class_`` is ``class``, and ``text_anchor`` is ``text-anchor``. Those that
            are None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = Markup("").join(children)
    return Markup(f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>")


def text(x: float, y: float, content: str, **attributes: Attribute) -> Markup:
    """Return a line of text."""
    return element("text", plain(content), x=x, y=y, **attributes)


def titled(title: str, *children: str, **attributes: Attribute) -> Markup:
    """Return a group with a title, which is shown under the mouse pointer."""
    return element("g", element("title", plain(title)), *children, **attributes)


def drawing(width: float, height: float, label: str, *children: str) -> Markup:
    """Return a picture that scales with its width; screen readers read ``label``."""
    return element(
        "svg",
        element("title", plain(label)),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
    )


def is_narrow(width: float) -> bool:
    """Return whether a picture is too narrow for labels beside its bars."""
    return width < _NARROW


def plain(content: str) -> str:
    """Return text with unprintable characters, such as marks of direction, replaced by spaces."""
    return "".join(c if c.isprintable() else " " for c in content)


def short(name: str, most: int) -> str:
    """Return the end of a name in at most ``most`` characters: a path's end is most specific."""
    return name if len(name) <= most else _ELLIPSIS + name[len(name) - most + 1 :]


def breakable(name: str) -> Markup:
    """Return a name with possible line breaks after its dots."""
    return Markup(".<wbr>").join(map(escape, name.split(".")))


def column(names: Iterable[str]) -> float:
    """Return the width in pixels of a column of names, each cut to 44 letters."""
    return 7.0 * min(44, max(map(len, names), default=0)) + 18


def clipped(sentence: str, most: int) -> str:
    """Return the beginning of a sentence in at most ``most`` characters."""
    return sentence if len(sentence) <= most else sentence[: most - 1] + _ELLIPSIS


def _number(value: Attribute) -> str:
    """Format a coordinate with one decimal at most."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


def count(amount: float) -> str:
    """Format a count with all digits: ``13,802``."""
    return f"{round(amount):,}"


def change(before: float | None, after: float, *, is_survey: bool = False) -> str:
    """Format a change: ``160 → 110``; in a survey, ``110 of 160`` (removable)."""
    if before is None:
        return count(after)
    if after in ((0, before) if is_survey else (before,)):
        return count(before)
    return (
        f"{count(after)} of {count(before)}" if is_survey else f"{count(before)} → {count(after)}"
    )


def brief(amount: float) -> str:
    """Format an amount with three digits: ``13.8 k``."""
    return in_thousands(amount, LARGE)


def size(amount: float) -> str:
    """Format a size in bytes: ``57.4 kB``."""
    return in_thousands(amount, (" bytes", " kB", " MB", " GB", " TB"))


def milliseconds(amount: float) -> str:
    """Format milliseconds: ``12.3 ms``, or µs below 0.1 ms."""
    return f"{amount:.3g} ms" if amount >= 0.1 or not amount else f"{1000 * amount:.3g} µs"


def duration(seconds: float) -> str:
    """Format a duration: ``48 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float) -> str:
    """Format a share: ``39.1 %``."""
    return f"{100 * share:.3g} %" if share < 0.9995 or isclose(share, 1) else f"{100 * share:.4g} %"


def metric(name: str, value: float) -> str:
    """Format a metric, in percent if it is a rate."""
    return f"{100 * value:.2f} %" if name in IN_PERCENT else f"{value:.4g}"


def error(value: float) -> str:
    """Format a difference: ``4.5e-07``."""
    return f"{value:.1e}" if value else "0"


def tick(value: float) -> str:
    """Format a number at an axis of a picture."""
    return f"{value:.4g}" if abs(value) < 10_000 else brief(value)


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most`` + 1."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** int(log10(span / most) // 1)
    step = next(step * by for by in (1, 2, 5, 10, 20) if span / (step * by) <= most)
    first = -int(-low // step)
    found = [number * step for number in range(first, int(high // step) + 1)]
    return found or [low]
