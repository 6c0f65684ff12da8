"""Report of a run: a page, and the data that the page is rendered from.

It is built from results in memory, or from the files in the folder of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import escape
from pydantic import ValidationError
from torch import nn

from l0prune.doors import is_provided, provided
from l0prune.errors import FileError
from l0prune.exporting.result import Export
from l0prune.files.atomic import write_whole
from l0prune.files.checked_json import read_json, read_text
from l0prune.plan.measures import Source
from l0prune.report.collect import (
    add_trainings,
    file_facts,
    from_export,
    from_model,
    from_survey,
    now,
    training_in,
    training_of,
)
from l0prune.report.content import Comparison, Content, Gain, Metric, Pair, Run, Training, parsed
from l0prune.report.survey import Survey
from l0prune.training.history import NAME, History

JSON, HTML, RESULT = "report.json", "report.html", "result.json"
_STAGES = ("dense", "finetune", "recover")  # stages of a recipe; rounds come after the first


class Report:
    """Report of a run: gains, certificate, cuts by layer, and training curves.

    ``save`` writes the report; a notebook shows it.

    Attributes:
        content: the whole report as data.
    """

    def __init__(self, content: Content) -> None:
        self.content = content

    @staticmethod
    def of(
        small: Export | None = None,
        history: History | Sequence[History] | None = None,
        *,
        model: nn.Module | None = None,
        latency: Source | None = None,
    ) -> Report:
        """Return the report of an export, of a training, or of both.

        Args:
            small: what ``l0prune.export`` gave.
            history: what ``l0prune.finetune`` gave; several of several stages.
            model: the gated model, for what an export of it would have, and for ``latency``.
            latency: a table of its times, for the time by layer.

        Raises:
            NotGated: the model carries no gates.
        """
        histories = [history] if isinstance(history, History) else list(history or ())
        if small is not None:
            content = from_export(small)
        elif model is not None:
            content = from_model(model)
        else:
            content = Content(title="Training", made=now())
        trainings = [training_of(each) for each in histories if each.records]
        content = add_trainings(content, trainings)
        if latency is not None and model is not None:
            content = provided("add_time")(content, latency, model)
        return Report(content)

    @staticmethod
    def of_survey(survey: Survey) -> Report:
        """Return the report of the possible cuts of a model, before training.

        Args:
            survey: what ``l0prune.survey`` gave.
        """
        return Report(from_survey(survey))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a ``report.json``.

        Raises:
            FileError: the file is missing, damaged, no report, or of a newer version.
        """
        return Report(parsed(read_text(path), path))

    def titled(self, title: str) -> Report:
        """Return the report under this title."""
        return Report(self.content.model_copy(update={"title": title}))

    def html(self, *, live: bool = False) -> str:
        """Return the page as self-contained HTML.

        Args:
            live: whether the page reloads itself periodically, while a run goes on.
        """
        page: str = provided("html")(self.content, live=live)
        return page

    def save(self, path: str | os.PathLike[str], *, live: bool = False) -> tuple[Path, Path]:
        """Write the page, and its data to a file of the same name with the ending ``.json``.

        Args:
            path: of the page, or a folder, for ``report.html`` in it.
            live: as for ``html``.

        Returns:
            The page's path, and that of the data; twice the latter where pages are not installed.

        Raises:
            FileError: they cannot be written.
        """
        page = Path(path) / HTML if Path(path).is_dir() else Path(path)
        data = page.with_suffix(".json")
        if page == data:
            raise FileError(f"{path} was not written: it is the page's path, such as {HTML}.")
        write_whole(data, self.content.model_dump_json(indent=1))
        if not is_provided("html"):
            return data, data
        write_whole(page, self.html(live=live))
        return page, data

    def to_dict(self) -> dict[str, Any]:
        """Return ``content`` as plain data."""
        return self.content.model_dump(mode="json")

    def __repr__(self) -> str:
        return f"Report({self.content.title}, {self.content.made})"

    def _repr_html_(self) -> str:
        """Return the page in an iframe, which keeps its style apart from the notebook's."""
        style = "width:100%;height:75vh;border:0"
        return f'<iframe style="{style}" srcdoc="{escape(self.html())}"></iframe>'


def report_of(path: Path) -> Report:
    """Return the report of a run's folder, or of its ``report.json``.

    A folder without one is searched for the result of a recipe, for records of trainings, and for
    several runs, which are then compared.

    Raises:
        FileError: there is no run, or a file is damaged.
    """
    if path.is_file():
        return Report.load(path)
    if not path.is_dir():
        raise FileError(f"there is no {path}. Give the folder of a run, or its {JSON}.")
    if (path / JSON).is_file():
        written = Report.load(path / JSON)
        if written.content.about != "sweep":  # a sweep may have more runs by now
            return written
    found = trainings_in(path)
    result = _result(path / RESULT)
    if not found and result is None and (runs := _runs_in(path)):
        return Report(_sweep_of(path.resolve().name, runs))
    if not found and result is None:
        raise FileError(
            f"{path} is no run's folder: it has neither {JSON} nor {NAME}. `l0prune run` and "
            "`l0prune finetune` write such folders."
        )
    content = of_trainings(path.resolve().name, found)
    return Report(content if result is None else _with_result(content, result, path))


def comparison(path: Path, names: Sequence[str]) -> Report:
    """Return the report that compares runs in folders of a folder.

    Args:
        path: the folder, where the report is to be saved.
        names: of the runs' folders in it.

    Raises:
        FileError: a file of a run is damaged.
    """
    runs = [(Path(name), report_of(path / name).content) for name in names]
    return Report(_sweep_of(path.resolve().name, runs))


def _runs_in(path: Path) -> list[tuple[Path, Content]]:
    """Return the runs in the subfolders of a folder; empty if there are fewer than two."""
    found = []
    for folder in sorted(each for each in path.iterdir() if each.is_dir()):
        if any((folder / name).is_file() for name in (JSON, RESULT, NAME)):
            found.append((folder.relative_to(path), report_of(folder).content))
    return found if len(found) > 1 else []


def _sweep_of(title: str, runs: Sequence[tuple[Path, Content]]) -> Content:
    """Return the report of several runs, each with its folder's path relative to the report."""
    found = [_run_of(folder, content) for folder, content in runs]
    return Content(title=title, made=now(), about="sweep", runs=found)


def _run_of(folder: Path, content: Content) -> Run:
    gain = content.gain
    time = None if gain.time is None else Pair(before=gain.time.before, after=gain.time.after)
    costs = {"params": gain.params, "macs": gain.macs, "time": time}
    return Run(
        name=folder.as_posix(),
        page=quote(f"{folder.as_posix()}/report.html"),
        metric=gain.metric,
        costs={name: cost for name, cost in costs.items() if cost is not None},
    )


def of_trainings(title: str, trainings: list[Training]) -> Content:
    """Return the report of trainings alone: curves, and the counts of an export at the end."""
    content = add_trainings(Content(title=title, made=now()), trainings)
    counted = [t.epochs[-1].amounts for t in trainings if t.epochs and t.epochs[-1].amounts]
    gain = {
        name: Pair(before=amount.dense, after=amount.actual)
        for name, amount in (counted[-1] if counted else {}).items()
        if name in ("params", "macs")
    }
    return content.model_copy(update={"gain": content.gain.model_copy(update=gain)})


def trainings_in(folder: Path) -> list[Training]:
    """Return the trainings in a run's folder, in order.

    Raises:
        FileError: records are damaged.
    """
    if (folder / NAME).exists():
        alone = training_in(folder)
        return [] if alone is None else [alone]
    rounds = sorted(folder.glob("round-*/finetune"), key=lambda each: (len(each.parent.name), each))
    first, *rest = (folder / name for name in _STAGES)
    stages = [first, *rounds, *rest]
    found = (training_in(each, str(each.relative_to(folder))) for each in stages)
    return [training for training in found if training is not None]


def _result(path: Path) -> dict[str, Any] | None:
    """Return the result of a recipe's run; None if the run has not ended."""
    if not path.exists():
        return None
    found = read_json(path, "`l0prune run` in this folder writes it anew, once it is removed.")
    if not isinstance(found, dict):
        raise FileError(f"{path} is damaged: it is no table of results.")
    return found


def tested(old: Metric | None, result: Mapping[str, Any]) -> Metric:
    """Return the metric of a recipe's result, with the value before from its trainings."""
    name = str(result["metric"])
    return Metric(
        name=name,
        larger_is_better=bool(old and old.larger_is_better),
        before=old.before if old and old.name == name else None,
        after=result[f"test_{name}"],
        of_file=result.get(f"onnx_test_{name}"),
    )


def _with_result(content: Content, result: dict[str, Any], folder: Path) -> Content:
    """Return the report with the result of a recipe's run."""
    try:
        file = folder / Path(str(result["onnx"])).name
        gain = Gain(
            params=Pair(before=result["params_before"], after=result["params"]),
            macs=Pair(before=result["macs_before"], after=result["macs"]),
            bytes=Pair(before=None, after=file.stat().st_size) if file.is_file() else None,
            metric=tested(content.gain.metric, result),
            seconds=content.gain.seconds,
        )
        certificate = [Comparison(**check) for check in result["certificate"]]
        files = [file_facts(file)] if file.is_file() else []
        return content.model_copy(
            update={
                "title": str(result["recipe"]),
                "gain": gain,
                "certificate": certificate,
                "notes": str(result.get("note", "")),
                "repeat": content.repeat.model_copy(update={"files": files}),
            }
        )
    except (KeyError, TypeError, ValidationError) as error:
        reason = "of the wrong form" if isinstance(error, ValidationError) else repr(error)
        raise FileError(f"{folder / RESULT} is damaged: {reason}") from error
