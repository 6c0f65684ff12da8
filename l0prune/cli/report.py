"""``l0prune report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli.edge import emit
from l0prune.cli.options import Json
from l0prune.errors import UsageError

RUNS = ("*.run", "runs/*")  # where `finetune` and `run` leave theirs

NoReport = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Write report.html, a page that shows what the run came to."
    ),
]


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run's folder, or a report.json; default: the newest run here."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page; default report.html in the run's folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the page of a run: what was gained, whether it is right, where it was taken, and how.

    Of a folder of several runs it compares them. It is one file that needs no network, made from
    report.json alone, or from what an older run has left. Example:

        l0prune report runs/digits-lenet
    """
    from l0prune.report.run_folder import report_of  # loads torch

    path = run or _newest()
    page, data = report_of(path).save(out or (path if path.is_dir() else path.with_suffix(".html")))
    emit({"page": str(page), "data": str(data)}, json, f"{page} written")


def _newest() -> Path:
    found = [path for pattern in RUNS for path in Path().glob(pattern) if path.is_dir()]
    if not found:
        raise UsageError(
            "there is no run here (MODEL.run, runs/NAME): name its folder, or a report.json."
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def repeatable(report: l0prune.Report, info: dict[str, Any]) -> l0prune.Report:
    """The report with the commands that its model file remembers, this one being the last."""
    *before, last = info["commands"]
    repeat = report.content.repeat.model_copy(update={"commands": before, "command": last})
    return l0prune.Report(report.content.model_copy(update={"repeat": repeat}))
