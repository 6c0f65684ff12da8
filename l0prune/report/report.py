"""The report: one page that a person looks at, and the data that it is made from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape
from torch import nn

from l0prune.errors import FileError
from l0prune.exporting.result import Export
from l0prune.files.atomic import write_whole
from l0prune.files.checked_json import read_text
from l0prune.report.content import Content, parsed
from l0prune.report.gathered import (
    now,
    of_export,
    of_model,
    of_survey,
    with_time,
    with_trainings,
)
from l0prune.report.page.html import html
from l0prune.report.survey import Survey
from l0prune.report.trainings import training_of
from l0prune.timing.table import LatencyTable
from l0prune.training.history import History

JSON, HTML = "report.json", "report.html"


class Report:
    """Report of a run: gains, certificate, cuts by layer, and training curves.

    ``save`` writes it; a notebook shows it.

    Attributes:
        content: all of it, as data.
    """

    def __init__(self, content: Content) -> None:
        self.content = content

    @staticmethod
    def of(
        dense: Export | None = None,
        history: History | Sequence[History] | None = None,
        *,
        model: nn.Module | None = None,
        latency: LatencyTable | None = None,
    ) -> Report:
        """The report of an export, of a training, or of both.

        Args:
            dense: what ``l0prune.export`` gave.
            history: what ``l0prune.finetune`` gave; several of several stages.
            model: the gated model, for what an export of it would have, and for ``latency``.
            latency: a table of its times, for the time by layer.

        Raises:
            NotGated: the model carries no gates.
        """
        histories = [history] if isinstance(history, History) else list(history or ())
        if dense is not None:
            content = of_export(dense)
        elif model is not None:
            content = of_model(model)
        else:
            content = Content(title="Training", made=now())
        trainings = [training_of(each) for each in histories if each.records]
        content = with_trainings(content, trainings)
        if latency is not None and model is not None:
            content = with_time(content, latency, model)
        return Report(content)

    @staticmethod
    def of_survey(survey: Survey) -> Report:
        """The report of what could be cut out of a model, before anything is trained.

        Args:
            survey: what ``l0prune.survey`` gave.
        """
        return Report(of_survey(survey))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a ``report.json``.

        Raises:
            FileError: there is none, or it is damaged, or no report, or of a newer version.
        """
        return Report(parsed(read_text(path), path))

    def titled(self, title: str) -> Report:
        """Return the report under this title."""
        return Report(self.content.model_copy(update={"title": title}))

    def html(self, *, live: bool = False) -> str:
        """The page: one file that needs no other.

        Args:
            live: whether it is to be loaded again every few seconds, while a run goes on.
        """
        return html(self.content, live=live)

    def save(self, path: str | os.PathLike[str], *, live: bool = False) -> tuple[Path, Path]:
        """Write the page, and beside it the data that it is made from, with the ending ``.json``.

        Args:
            path: of the page, or a folder, for ``report.html`` in it.
            live: as for ``html``.

        Returns:
            The page's path, and that of the data.

        Raises:
            FileError: they cannot be written.
        """
        page = Path(path) / HTML if Path(path).is_dir() else Path(path)
        data = page.with_suffix(".json")
        if page == data:
            raise FileError(f"{path} was not written: it is the page's path, such as {HTML}.")
        write_whole(data, self.content.model_dump_json(indent=1))
        write_whole(page, self.html(live=live))
        return page, data

    def to_dict(self) -> dict[str, Any]:
        """``content`` as plain data."""
        return self.content.model_dump(mode="json")

    def __repr__(self) -> str:
        return f"Report({self.content.title}, {self.content.made})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, where its style meets no other."""
        style = "width:100%;height:75vh;border:0"
        return f'<iframe style="{style}" srcdoc="{escape(self.html())}"></iframe>'
