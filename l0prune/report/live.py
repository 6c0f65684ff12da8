"""``l0prune.finetune`` and ``train_dense``: training with a report page that is kept up to date."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from l0prune.doors import is_provided, provided
from l0prune.errors import L0pruneError, warn
from l0prune.plan.targets import TARGET
from l0prune.report.report import HTML, Report, of_trainings, trainings_in
from l0prune.training import run
from l0prune.training.history import History
from l0prune.training.keywords import DenseKeywords, Keywords
from l0prune.training.phases import watched

_EVERY = 5.0  # least seconds between two updates


@dataclass
class Live:
    """State of the page of a run.

    Attributes:
        begun: whether this process was notified of an epoch; only the one that writes is.
    """

    begun: bool = False


@contextmanager
def live_page(folder: Path, title: str) -> Iterator[Live]:
    """Write ``report.html`` with the finished epochs into a run's folder, within the context.

    Meanwhile the page reloads itself periodically. If the context raises, the page shows the
    reason. If nothing is trained, the page is left unchanged.
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


def finetune(
    model: nn.Module, data: Any, *, report: bool = True, **settings: Unpack[Keywords]
) -> History:
    """Learn the weights and gates of a gated model together, in place, under a budget or λ·E‖θ‖₀.

    λ warms up, the network is pruned, and with fixed gates, which just meet the budgets, the
    weights settle. After each epoch the moving average of weights, buffers and gates is tested; in
    the end the model has these averages. With ``out`` a checkpoint is kept there, from which
    ``resume=True`` resumes (bitwise identical on the CPU), and ``report.html``, which shows the
    run while it goes on.

    Args:
        model: a model with gates (``l0prune.gate``).
        data: what ``l0prune.load_data`` returned; a dataset; batches, each (inputs, targets) or a
            mapping that holds its labels; (training, test) of those; or a ``Task``.
        report: whether that page is written.
        **settings: see ``Settings``.

    Returns:
        What was measured in each epoch.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a setting makes no sense, or ``resume`` is asked of another run.
        DataError: the data is empty, or does not fit the model.
        TrainingError: a loss or weight became nan or inf.
        FileError: ``out`` cannot be written, or what is in it cannot be read.
        Interrupted: Ctrl-C or SIGTERM. The model then has the averages that it had come to; after
            any other error it is as it was found.
    """

    def report_on(history: History) -> Report:
        latency = settings.get("latency")
        if latency is None and is_provided("known_table"):
            latency = provided("known_table")(model, settings.get("target", TARGET))
        if not hasattr(latency, "setting"):  # another source of times, without those by layer
            latency = None
        return Report.of(history=history, model=model, latency=latency)

    return _train_with_page(
        lambda: run.finetune(model, data, **settings),
        report_on,
        type(model).__name__,
        settings.get("out") if report else None,
    )


def train_dense(
    model: nn.Module, data: Any, *, report: bool = True, **settings: Unpack[DenseKeywords]
) -> History:
    """Train a model without gates, in place, by the loop and the settings of ``finetune``.

    Raises:
        AlreadyGated: the model carries gates.
        UsageError: a setting is one of gates; and see ``finetune``.
    """

    return _train_with_page(
        lambda: run.train_dense(model, data, **settings),
        lambda history: Report.of(history=history),
        type(model).__name__,
        settings.get("out") if report else None,
    )


def _train_with_page(
    train: Callable[[], History],
    report_on: Callable[[History], Report],
    title: str,
    folder: str | os.PathLike[str] | None,
) -> History:
    """Train, with a page in the folder, if any; warn if the final page cannot be written."""
    if folder is None:
        return train()
    folder = Path(folder)
    with live_page(folder, title) as page:
        history = train()
    if page.begun:
        try:
            report_on(history).titled(title).save(folder / HTML)
        except L0pruneError as error:
            warn(f"there is no report: {error}")
    return history
