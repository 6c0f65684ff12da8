"""The page of a run that goes on: renewed as epochs are done, and right when the run stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from l0prune.report.report import HTML, Report
from l0prune.report.run_folder import of_trainings, trainings_in
from l0prune.training.epochs import watched
from l0prune.training.history import History

_EVERY = 5.0  # seconds between two renewals, at least


@dataclass
class Live:
    """A page of a run.

    Attributes:
        begun: whether an epoch was done, and told to this process, which is the one that writes.
    """

    begun: bool = False


@contextmanager
def live_page(folder: Path, title: str) -> Iterator[Live]:
    """Within the context, ``report.html`` in a run's folder shows the epochs that are done.

    While they go on, the page looks for a newer one every few seconds. Where the context raises,
    the page says so, and why. Where nothing is trained, it is left alone.

    Args:
        folder: of the run, which its trainings write into.
        title: of the page.
    """
    page, renewed = Live(), -_EVERY

    def renew(history: History) -> None:
        nonlocal renewed
        page.begun = True
        if time.monotonic() - renewed >= _EVERY:
            _write(folder, title, live=True)
            renewed = time.monotonic()

    try:
        with watched(renew):
            yield page
    except BaseException as error:
        if page.begun:
            _write(folder, title, stopped=str(error) or type(error).__name__)
        raise


def _write(folder: Path, title: str, *, live: bool = False, stopped: str = "") -> None:
    content = of_trainings(title, trainings_in(folder))
    report = Report(content.model_copy(update={"stopped": stopped}))
    report.save(folder / HTML, live=live)
