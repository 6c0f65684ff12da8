"""Picture of a sweep: runs as points, metric over cost, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from l0prune.features.page import elements
from l0prune.features.page.elements import drawing, element, text, titled
from l0prune.report.content import Run
from l0prune.training.history import IN_PERCENT

COSTS = ("macs", "params", "time")


def pareto_front(
    points: Sequence[tuple[float, float]], larger_is_better: bool = False
) -> list[int]:
    """Return the indices of the points on the Pareto front, the cheapest first.

    A point is cost and metric; on the front no other is at least as good in both.
    """
    sign = -1 if larger_is_better else 1
    values = [(cost, sign * metric) for cost, metric in points]

    def is_beaten(mine: tuple[float, float]) -> bool:
        return any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in values)

    unbeaten = [number for number, mine in enumerate(values) if not is_beaten(mine)]
    return sorted(unbeaten, key=lambda number: values[number])


_LABELS = {"macs": "MACs", "params": "parameters", "time": "the time of a call"}
_TOP, _PLOT, _BOTTOM, _LEFT, _RIGHT = 30, 260, 44, 56, 16


def shown_costs(runs: Sequence[Run]) -> list[str]:
    """Return the costs that are known of at least two runs."""
    return [name for name in COSTS if len(_points(runs, name)) > 1]


def sweep(runs: Sequence[Run], cost: str, width: int) -> Markup:
    """Draw the runs as points, numbered from 1; a line joins those on the Pareto front."""
    points = _points(runs, cost)
    metric = next(run.metric for run in runs if run.metric is not None)
    better = pareto_front(list(points.values()), metric.larger_is_better)
    front_of = [list(points)[place] for place in better]
    values = [value for _, value in points.values()]
    dense = metric.before
    if dense is not None:
        values.append(_scaled(metric.name, dense))
    low, high = min(values), max(values)
    low, high = low - (high - low) * 0.1 - 1e-9, high + (high - low) * 0.1 + 1e-9
    end = max(100.0, *(share for share, _ in points.values()))

    def at(share: float, value: float) -> tuple[float, float]:
        x = _LEFT + (width - _LEFT - _RIGHT) * share / end
        return x, _TOP + _PLOT * (high - value) / (high - low)

    name = metric.name.removeprefix("test_").replace("_", " ").capitalize()
    unit = " in %" if metric.name in IN_PERCENT else ""
    title = f"{name}{unit} over {_LABELS[cost]} in % of the dense network’s"
    drawn = [text(0, 13, title, class_="heading")]
    for value in elements.ticks(low, high):
        _, y = at(0, value)
        drawn.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(text(_LEFT - 6, y + 4, elements.tick(value), class_="tick", text_anchor="end"))
    for share in elements.ticks(0, end):
        x, _ = at(share, low)
        label = elements.tick(share)
        drawn.append(text(x, _TOP + _PLOT + 18, label, class_="tick", text_anchor="middle"))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*points[number]) for number in front_of))
    drawn.append(element("polyline", points=line, class_="curve c0"))
    if dense is not None:
        x, y = at(100.0, _scaled(metric.name, dense))
        dot = element("circle", cx=x, cy=y, r=6, class_="hollow")
        label = text(x - 10, y - 10, "dense", class_="tick", text_anchor="end")
        drawn.append(titled("the dense network", dot, label))
    for number, (share, value) in points.items():
        x, y = at(share, value)
        said = f"{runs[number].name}: {elements.tick(value)} at {elements.percent(share / 100)}"
        kind = "remark" if number in front_of else "beaten"
        dot = element("circle", cx=x, cy=y, r=9, class_=kind)
        drawn.append(
            titled(
                said, dot, text(x, y + 4, str(number + 1), class_="number", text_anchor="middle")
            )
        )
    said = f"{len(points)} runs, of which {len(front_of)} are on the Pareto front"
    return drawing(width, _TOP + _PLOT + _BOTTOM, f"{title}: {said}", *drawn)


def _points(runs: Sequence[Run], cost: str) -> dict[int, tuple[float, float]]:
    """Return share of the cost in % and metric by index of the run, if both are known."""
    found = {}
    for number, run in enumerate(runs):
        pair = run.costs.get(cost)
        if run.metric is not None and pair is not None and pair.share is not None:
            found[number] = (100 * pair.share, _scaled(run.metric.name, run.metric.after))
    return found


def _scaled(name: str, value: float) -> float:
    return 100 * value if name in IN_PERCENT else value
