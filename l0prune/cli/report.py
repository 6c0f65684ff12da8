"""``l0prune report``: write the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from l0prune.cli import options
from l0prune.cli.messages import emit
from l0prune.errors import UsageError

RUNS = ("*.run", "runs/*")  # folders of `finetune` and `run`


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run's folder, or a report.json; default: the newest run here."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page; default report.html in the run's folder.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write the page of a run: gains, certificate, cuts by layer, and training curves.

    Of a folder of several runs it compares them. It is one file that needs no network, made from
    report.json alone, or from what an older run has left.

    Examples:
        l0prune report
        l0prune report runs/digits-wide --out page.html
        l0prune report runs
    """
    from l0prune.report.report import report_of  # loads torch

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
