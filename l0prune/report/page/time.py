"""Time by layer as a waterfall: from the dense network's down to the small one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.report.content import OwnerTime, TimeByLayer
from l0prune.report.page import numbers
from l0prune.report.page.elements import drawing, element, short, text, titled

_MOST = 16  # modules that are shown one by one


@dataclass(frozen=True)
class Step:
    """A bar of the waterfall, from ``before`` milliseconds to ``after``."""

    name: str
    before: float
    after: float
    kind: str


def time_by_layer(time: TimeByLayer, width: int) -> Markup:
    """The picture.

    Args:
        time: with one module at least.
        width: of the picture.
    """
    steps, is_narrow = steps_of(time.owners), width < 600
    row = 38 if is_narrow else 26
    label, right = (0, 0) if is_narrow else (290, 110)
    most = max(max(step.before, step.after) for step in steps) or 1.0

    def at(ms: float) -> float:
        return label + (width - label - right) * ms / most

    drawn = []
    for number, step in enumerate(steps):
        y = row * number
        said = _said(step)
        low, high = sorted((at(step.before), at(step.after)))
        bar_y = y + (20 if is_narrow else 6)
        drawn.append(
            titled(
                f"{step.name}: {said}",
                text(0, y + (14 if is_narrow else 17), short(step.name, 30), class_="label"),
                text(width, y + (14 if is_narrow else 17), said, class_="value", text_anchor="end"),
                element(
                    "rect",
                    x=low,
                    y=bar_y,
                    width=max(high - low, 1.0),
                    height=13,
                    rx=2,
                    class_=step.kind,
                ),
            )
        )
    said = f"From {numbers.milliseconds(steps[0].after)} to {numbers.milliseconds(steps[-1].after)}"
    return drawing(width, row * len(steps) + 4, f"{said}, by layer", *drawn)


def steps_of(owners: Sequence[OwnerTime]) -> list[Step]:
    """The bars: all of the dense network, what each module saves, and what is left."""
    ranked = sorted(owners, key=lambda of: of.after - of.before)
    shown, rest = ranked[:_MOST], ranked[_MOST:]
    if rest:
        before, after = sum(of.before for of in rest), sum(of.after for of in rest)
        name = f"{len(rest)} others"
        shown = [*shown, OwnerTime(name=name, before=before, after=after)]
    total = sum(of.before for of in owners)
    steps = [Step("dense network", 0.0, total, "was")]
    for of in shown:
        change = of.after - of.before
        steps.append(Step(of.name, total, total + change, "saved" if change <= 0 else "lost"))
        total += change
    return [*steps, Step("small network", 0.0, total, "kept")]


def _said(step: Step) -> str:
    if step.kind in ("was", "kept"):
        return numbers.milliseconds(step.after)
    change = step.after - step.before
    sign = "−" if change <= 0 else "+"
    return sign + numbers.milliseconds(abs(change))
