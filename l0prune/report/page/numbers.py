"""Numbers for people."""

from __future__ import annotations

from math import isclose, log10

from l0prune.training.description import IN_PERCENT

_UNITS = ("", " k", " M", " G", " T")


def count(amount: float) -> str:
    """All digits: ``13,802``."""
    return f"{round(amount):,}"


def change(before: float | None, after: float, *, is_survey: bool = False) -> str:
    """``160 → 110``; in a survey, ``110 of 160`` can go."""
    if before is None:
        return count(after)
    if after in ((0, before) if is_survey else (before,)):
        return count(before)
    return (
        f"{count(after)} of {count(before)}" if is_survey else f"{count(before)} → {count(after)}"
    )


def brief(amount: float) -> str:
    """Three digits: ``13.8 k``."""
    value, units = float(amount), list(_UNITS)
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g}{units[0]}"


def size(amount: float) -> str:
    """Bytes: ``57.4 kB``."""
    value, units = float(amount), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def milliseconds(amount: float) -> str:
    """``12.3 ms``, or µs where it is less than a tenth of one."""
    return f"{amount:.3g} ms" if amount >= 0.1 or not amount else f"{1000 * amount:.3g} µs"


def duration(seconds: float) -> str:
    """``48 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float) -> str:
    """``39.1 %``."""
    return f"{100 * share:.3g} %" if share < 0.9995 or isclose(share, 1) else f"{100 * share:.4g} %"


def metric(name: str, value: float) -> str:
    """A metric as its kind is written."""
    return f"{100 * value:.2f} %" if name in IN_PERCENT else f"{value:.4g}"


def error(value: float) -> str:
    """A difference: ``4.5e-07``."""
    return f"{value:.1e}" if value else "0"


def tick(value: float) -> str:
    """A number at an axis."""
    return f"{value:.4g}" if abs(value) < 10_000 else brief(value)


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers from ``low`` to ``high``, no more than ``most`` + 1 of them."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** int(log10(span / most) // 1)
    step = next(step * by for by in (1, 2, 5, 10, 20) if span / (step * by) <= most)
    first = -int(-low // step)
    found = [number * step for number in range(first, int(high // step) + 1)]
    return found or [low]
