"""The report of a recipe's run, written into its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

import l0prune
from l0prune.exporting.result import Export
from l0prune.files.consent import is_code
from l0prune.recipes.schema import Recipe
from l0prune.report.content import Fit, Metric
from l0prune.report.gathered import of_export, repeated, with_time, with_trainings
from l0prune.report.report import HTML, Report
from l0prune.report.run_folder import trainings_in


def write_page(
    recipe: Recipe,
    result: dict[str, Any],
    exports: Sequence[Export],
    tuned: nn.Module,
    files: Sequence[Path],
    folder: Path,
) -> Path:
    """Write ``report.html`` and ``report.json``.

    Args:
        recipe: of the run.
        result: what it came to.
        exports: of each round.
        tuned: the gated model of the last one.
        files: that were written.
        folder: of the run.

    Returns:
        The page's path.

    Raises:
        FileError: they cannot be written, or what was measured cannot be read.
    """
    content = of_export(exports[-1], exports[0])
    content = with_trainings(content, trainings_in(folder))
    fit = l0prune.read_info(folder / "tuned.pt").get("fitted")
    name, tested = result["metric"], content.gain.metric
    metric = Metric(
        name=name,
        larger_is_better=tested is not None and tested.larger_is_better,
        before=tested.before if tested is not None and tested.name == name else None,
        after=result[f"test_{name}"],
        of_file=result[f"onnx_test_{name}"],
    )
    old = content.repeat
    seen = {"seed": recipe.seed, "device": old.device, "preprocessing": old.preprocessing}
    repeat = repeated(files, _shown(recipe)).model_copy(update=seen)
    update = {
        "title": recipe.name,
        "gain": content.gain.model_copy(update={"metric": metric}),
        "repeat": repeat,
        "fit": None if fit is None else Fit.model_validate(fit),
    }
    content = content.model_copy(update=update)
    if recipe.latency is not None and not recipe.rounds:
        table = l0prune.LatencyTable.load(folder / "latency.json")
        content = with_time(content, table, tuned)
    page, _ = Report(content).save(folder / HTML)
    return page


def _shown(recipe: Recipe) -> dict[str, Any]:
    """The recipe without the folders that its Python files lie in: pages are there to be mailed."""
    data = recipe.model_dump(mode="json")
    for place, name in ((data["model"], "source"), (data["data"], "source"), (data, "report")):
        if place[name] is not None and is_code(place[name]):
            path, _, function = place[name].rpartition(":")
            place[name] = f"{Path(path).name}:{function}"
    return data
