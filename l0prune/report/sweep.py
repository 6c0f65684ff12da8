"""Several runs of one network: what each of them costs, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from l0prune.report.content import Content, Pair, Run
from l0prune.report.gathered import now

COSTS = ("macs", "params", "time")


def sweep_of(title: str, runs: Sequence[tuple[Path, Content]]) -> Content:
    """The report of runs, each with the folder that it lies in, relative to that of the report."""
    found = [_run(folder, content) for folder, content in runs]
    return Content(title=title, made=now(), about="sweep", runs=found)


def _run(folder: Path, content: Content) -> Run:
    gain = content.gain
    time = None if gain.time is None else Pair(before=gain.time.before, after=gain.time.after)
    costs = {"params": gain.params, "macs": gain.macs, "time": time}
    return Run(
        name=folder.as_posix(),
        page=quote(f"{folder.as_posix()}/report.html"),
        metric=gain.metric,
        costs={name: cost for name, cost in costs.items() if cost is not None},
    )


def front(points: Sequence[tuple[float, float]], larger_is_better: bool = False) -> list[int]:
    """Return the Pareto front: the points that no other one beats in cost or quality.

    Args:
        points: of each run its cost and its metric.
        larger_is_better: of the metric.

    Returns:
        Their numbers, the cheapest first.
    """
    sign = -1 if larger_is_better else 1
    values = [(cost, sign * metric) for cost, metric in points]

    def is_beaten(mine: tuple[float, float]) -> bool:
        return any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in values)

    unbeaten = [number for number, mine in enumerate(values) if not is_beaten(mine)]
    return sorted(unbeaten, key=lambda number: values[number])
