"""``l0prune sweep``: run a recipe with all combinations of settings, and compare the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from l0prune.cli import options
from l0prune.cli.messages import emit, err, say
from l0prune.cli.options import key_values
from l0prune.cli.project import find_recipe
from l0prune.errors import TrainingError, UsageError
from l0prune.progress.launched import is_launched

if TYPE_CHECKING:
    from l0prune.features.sweep.grid import Point
    from l0prune.features.sweep.runs import Ending

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=a,b,c: one run for each value; may be repeated."),
]
Where = Annotated[
    str, typer.Option("--on", help="processes (of this machine), submitit (Slurm) or ray.")
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at a time [as many as GPUs, else cores; 1 where it times]."),
]
JobParameters = Annotated[
    list[str] | None,
    typer.Option("--job", help="KEY=VALUE for submitit (slurm_partition=gpu) or Ray (num_gpus=1)."),
]


def sweep(
    recipe: options.Recipe,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value for all runs, as in `l0prune run`."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Budgets, such as macs=0.3,0.5,params=10k: a run for each.")
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2.")] = None,
    sweeps: Settings = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the sweep; default sweeps/NAME.")
    ] = None,
    jobs: Jobs = None,
    where: Where = "processes",
    job: JobParameters = None,
    data_root: options.DataRoot = None,
    report: options.WithReport = True,
    json: options.Json = False,
) -> None:
    """Run a recipe with each combination of some settings, and compare the runs. Resumable.

    Each run has a folder below --out; finished runs are skipped.

    Examples:
        l0prune sweep digits-wide --budget macs=0.3,0.5,0.7 --seed 0,1,2
        l0prune sweep my.toml --set finetune.lr=1e-3,1e-2 finetune.epochs=20
        l0prune sweep my.toml --seed 0,1 --on submitit --job slurm_partition=gpu
    """
    if is_launched():
        raise UsageError("a sweep starts its runs by itself: leave torchrun out")
    from l0prune.features.recipes import files as recipe_files  # loads torch, as do the next ones
    from l0prune.features.sweep import grid, runs
    from l0prune.features.sweep.launchers import launcher
    from l0prune.files.atomic import claimed

    fixed = overrides or []
    base = recipe_files.load(recipe, fixed)
    settings = grid.asked(base, budget, seed, sweeps or [])
    points = grid.points(recipe, fixed, settings)
    target = folder or Path("sweeps") / base.name
    if jobs is None and where == "processes" and base.latency is not None:
        jobs = 1  # concurrent runs would distort the measured times
    with claimed(target):
        started = launcher(where, target, jobs, key_values(job, "timeout_min=60"))
        grid.record(target, base, settings)
        words = runs.run_words(find_recipe(recipe), fixed, data_root, report)
        with _progress(points, target, runs.last_line) as (tell, look):
            endings = runs.Sweep(points, target, words, started, tell).run(look)
        result = _result(points, endings, target, report)
    emit(result, json, _table(result))
    if result["page"] is not None:
        say(f"the comparison is {result['page']}")
    without = [run for run in result["runs"] if run["state"] != "done"]
    if without:
        lines = [f"  {run['name']} {run['state']}: {run['reason']}" for run in without]
        raise TrainingError(
            f"{len(without)} of {len(points)} runs have no result; the same command goes on with "
            "them:\n" + "\n".join(lines)
        )


@contextmanager
def _progress(
    points: Sequence[Point], folder: Path, last_line: Callable[[Path, Point], str]
) -> Iterator[tuple[Callable[[Point, Ending], None], Callable[[], None]]]:
    """Show active runs with their last line of output; without a terminal a line per ended run."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    live = Progress(*columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal)
    whole = live.add_task("runs", total=len(points))
    running: dict[str, tuple[Point, Any]] = {}
    done = 0

    def tell(point: Point, ending: Ending) -> None:
        nonlocal done
        if ending.state == "running":
            running[point.name] = (point, live.add_task(point.name, total=None))
            return
        done += 1
        live.update(whole, completed=done)
        was_there = point.name not in running
        if not was_there:
            live.remove_task(running.pop(point.name)[1])
        how = f"{ending.state}{' before' if was_there else ''}"
        live.console.print(f"{point.name}: {how} ({done} of {len(points)})", markup=False)

    def look() -> None:
        if err.is_terminal:
            for point, task in running.values():
                said = last_line(folder, point)[: max(20, err.width - 60)].replace("[", r"\[")
                live.update(task, description=f"{point.name}  {said}")

    with live:
        yield tell, look


def _result(
    points: Sequence[Point], endings: Mapping[str, Ending], folder: Path, report: bool
) -> dict[str, Any]:
    """Return each run, the table over seeds, and the page, as plain data."""
    from l0prune.report.report import comparison

    runs = [_run(point, endings[point.name], folder) for point in points]
    done = [run["name"] for run in runs if run["state"] == "done"]
    page = comparison(folder, done).save(folder)[0] if report and len(done) > 1 else None
    return {
        "folder": str(folder),
        "page": None if page is None else str(page),
        "table": _over_seeds(runs),
        "runs": runs,
    }


def _run(point: Point, ending: Ending, folder: Path) -> dict[str, Any]:
    from l0prune.features.sweep.runs import result_of
    from l0prune.report.report import report_of

    found: dict[str, Any] = {
        "name": point.name,
        "settings": dict(point.settings),
        "state": ending.state,
        "reason": ending.reason,
    }
    result = result_of(folder, point) if ending.state == "done" else None
    if result is None:
        return found
    time = report_of(folder / point.name).content.gain.time
    name = result["metric"]
    counts = {key: result[key] for key in ("macs", "macs_before", "params", "params_before")}
    return {
        **found,
        "metric": name,
        "value": result[f"test_{name}"],
        **counts,
        "ms": None if time is None else time.after,
    }


def _over_seeds(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per combination of settings without the seed: mean and range of the runs."""
    from l0prune.features.sweep.grid import SEED

    groups: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        key = tuple(item for item in run["settings"].items() if item[0] != SEED)
        groups.setdefault(key, []).append(run)
    return [_row(dict(key), found) for key, found in groups.items()]


def _row(settings: dict[str, str], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    done = [run for run in runs if run["state"] == "done"]
    row: dict[str, Any] = {"settings": settings, "runs": len(runs), "done": len(done)}
    row["metric"] = done[0]["metric"] if done else None
    for name in ("value", "macs", "params", "ms"):
        values = [run[name] for run in done if run[name] is not None]
        row[name] = (
            {"mean": fmean(values), "low": min(values), "high": max(values)} if values else None
        )
    for name in ("macs", "params"):
        row[f"{name}_before"] = done[0][f"{name}_before"] if done else None
    return row


def _table(result: Mapping[str, Any]) -> Table:
    from l0prune.features.sweep.grid import label
    from l0prune.training.history import IN_PERCENT

    rows = result["table"]
    metric = next((row["metric"] for row in rows if row["metric"]), "metric")
    has_times = any(row["ms"] for row in rows)
    columns = ["", "runs", metric, "macs", "params", *(["ms"] if has_times else [])]
    table = Table(*columns, title=f"{result['folder']}: mean (lowest to highest) over seeds")
    for row in rows:
        name = " ".join(label(*item) for item in row["settings"].items()) or "all"
        form = ".2%" if row["metric"] in IN_PERCENT else ".4g"
        cells = [_cell(row["value"], form)]
        for each in ("macs", "params"):
            dense = row[f"{each}_before"]
            share = f" {row[each]['mean'] / dense:.1%}" if dense else ""
            cells.append(_cell(row[each], ",.0f") + share)
        cells += [_cell(row["ms"], ".3g")] if has_times else []
        table.add_row(name, f"{row['done']} of {row['runs']}", *cells)
    return table


def _cell(found: Mapping[str, float] | None, form: str) -> str:
    if found is None:
        return ""
    if found["low"] == found["high"]:
        return format(found["mean"], form)
    return f"{found['mean']:{form}} ({found['low']:{form}} to {found['high']:{form}})"
