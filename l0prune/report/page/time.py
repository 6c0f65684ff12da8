"""Time by layer as a waterfall: from the dense network's down to the small one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from l0prune.report.content import OwnerTime, TimeByLayer
from l0prune.report.page import numbers
from l0prune.report.page.elements import column, drawing, element, is_narrow, short, text, titled

_NO_MODULE = "the model’s own forward"  # what it computes beside its modules
_SLIGHT = 0.002  # of the whole time
_MOST = 24  # bars beside the first and the last


@dataclass(frozen=True)
class Step:
    """A bar of the waterfall, from ``before`` milliseconds to ``after``.

    Attributes:
        filling: of what is left, milliseconds for what only fills whole blocks.
    """

    name: str
    before: float
    after: float
    kind: str
    filling: float = 0.0


def time_by_layer(time: TimeByLayer, width: int) -> Markup:
    """The picture.

    Args:
        time: with one module at least.
        width: of the picture.
    """
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
        drawn.append(
            titled(
                f"{step.name}: {said}{_filled(step)}",
                text(
                    0,
                    line,
                    short(step.name, 30 if narrow else 44),
                    class_="label",
                ),
                text(width, line, said, class_="value", text_anchor="end"),
                element(
                    "rect",
                    x=low,
                    y=bar_y,
                    width=max(high - low, 1.0),
                    height=13,
                    rx=2,
                    class_=step.kind,
                ),
                *_filling(step, at, bar_y),
            )
        )
    said = f"From {numbers.milliseconds(steps[0].after)} to {numbers.milliseconds(steps[-1].after)}"
    return drawing(width, row * len(steps) + 4, f"{said}, by layer", *drawn)


def by_block(owners: Sequence[OwnerTime]) -> list[OwnerTime]:
    """Modules in network order, those of one block together where there are too many to show."""
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
    return [_together(name, members) for name, members in blocks.items()]


def _together(name: str, owners: Sequence[OwnerTime]) -> OwnerTime:
    return OwnerTime(
        name=name,
        before=sum(of.before for of in owners),
        after=sum(of.after for of in owners),
        filling=sum(of.filling for of in owners),
    )


def _block(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth]) or _NO_MODULE


def steps_of(owners: Sequence[OwnerTime]) -> list[Step]:
    """The bars: all of the dense network, what each of these saves, and what is left."""
    total = sum(of.before for of in owners)
    changed = [of for of in owners if abs(of.after - of.before) > _SLIGHT * total]
    if rest := [of for of in owners if of not in changed]:
        changed.append(_together(f"{len(rest)} that hardly changed", rest))
    steps = [Step("dense network", 0.0, total, "was")]
    for of in changed:
        change = of.after - of.before
        kind = "saved" if change <= 0 else "lost"
        steps.append(Step(of.name, total, total + change, kind, of.filling))
        total += change
    filling = sum(of.filling for of in owners)
    return [*steps, Step("small network", 0.0, total, "kept", filling)]


def _filling(step: Step, at: Callable[[float], float], y: float) -> list[Markup]:
    """Draw the part of a step that is due to whole blocks."""
    low, high = at(max(step.after - step.filling, 0.0)), at(step.after)
    if high - low < 1:
        return []
    size = {"width": high - low, "height": 13}
    return [element("rect", x=low, y=y, rx=2, class_="filling", **size)]


def _filled(step: Step) -> str:
    if not step.filling:
        return ""
    return f"; {numbers.milliseconds(step.filling)} of what is left only fill whole blocks"


def _said(step: Step) -> str:
    if step.kind in ("was", "kept"):
        return numbers.milliseconds(step.after)
    change = step.after - step.before
    sign = "−" if change < 0 else "+" if change else ""
    return sign + numbers.milliseconds(abs(change))
