"""Execution of a sweep's remaining runs, several at a time, and their final states."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from l0prune.errors import FileError
from l0prune.features.sweep.grid import Point
from l0prune.features.sweep.launchers import CommandLine, Job, Launcher
from l0prune.files.atomic import is_claimed, replacement
from l0prune.files.checked_json import read_json
from l0prune.report.report import RESULT
from l0prune.training.history import NAME

LOGS = "logs"  # subfolder of the sweep with the output of each run
_DENSE, _TRAINING = "dense.pt", "dense"  # in a run's folder: the network that is trained first
_PAUSE = 0.2  # seconds between two polls

State = Literal["running", "done", "failed", "lost"]


@dataclass(frozen=True)
class Ending:
    """State of a run of a sweep.

    Attributes:
        state: running; done with a result; failed; or lost, if it was ended from outside.
        reason: why there is no result.
    """

    state: State
    reason: str = ""


Tell = Callable[[Point, Ending], None]


def result_of(folder: Path, point: Point) -> dict[str, Any] | None:
    """Return the result of a run in the folder of the sweep; None if it has not ended."""
    path = folder / point.name / RESULT
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = read_json(path)
    except FileError:
        return None  # the run is repeated
    # A first result is written before sections of features have added theirs.
    return found if found.keys() >= point.recipe.further.keys() else None


def last_line(folder: Path, point: Point) -> str:
    """Return the last line of a run's output, or the error that it ended with."""
    path = folder / LOGS / f"{point.name}.txt"
    try:
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    _, is_error, error = text.rpartition("error: ")
    if is_error:
        return " ".join(error.split())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class Sweep:
    """Runs of one sweep.

    A network that a recipe trains first is trained by one of the runs that share it, and copied to
    the others.

    Args:
        points: all of the runs.
        folder: folder of the sweep.
        command: function that returns the words of a run's command, for its point and folder.
        launcher: launcher of the runs.
        tell: called when a run begins and when it ends.
    """

    def __init__(
        self,
        points: Sequence[Point],
        folder: Path,
        command: Callable[[Point, Path], Sequence[str]],
        launcher: Launcher,
        tell: Tell,
    ) -> None:
        self._points, self._folder = points, folder.resolve()
        self._command, self._launcher, self._tell = command, launcher, tell
        self._running: dict[str, tuple[Point, Job]] = {}
        self.endings: dict[str, Ending] = {}

    def run(self, look: Callable[[], None] = lambda: None) -> dict[str, Ending]:
        """Execute all runs that are not done; return their endings, by name of the folder.

        Args:
            look: called after each poll while runs go on.

        Raises:
            KeyboardInterrupt: Ctrl-C, SIGTERM or a closed terminal; the runs were stopped.
        """
        (self._folder / LOGS).mkdir(exist_ok=True)
        waiting = []
        for point in self._points:
            if result_of(self._folder, point) is None:
                waiting.append(point)
            else:
                self._end(point, Ending("done"))
        with _stopped_by_signals(), self._stopped():
            while waiting or self._running:
                self._collect()
                while len(self._running) < self._launcher.jobs:
                    free = next(filter(self._may_begin, waiting), None)
                    if free is None:
                        break
                    waiting.remove(free)
                    if result_of(self._folder, free) is None:
                        self._begin(free)
                    else:  # of a run that went on when its launcher was killed
                        self._end(free, Ending("done"))
                look()
                time.sleep(_PAUSE)
        return self.endings

    def _collect(self) -> None:
        for point, job in [*self._running.values()]:
            code = job.poll()
            if code is not None:
                del self._running[point.name]
                self._end(point, self._ending(point, code))

    def _ending(self, point: Point, code: int | str) -> Ending:
        if isinstance(code, str):
            return Ending("lost", code)
        if code == 0 and result_of(self._folder, point) is not None:
            return Ending("done")
        said = last_line(self._folder, point) or f"it ended with exit code {code}"
        return Ending("failed", said)

    def _end(self, point: Point, ending: Ending) -> None:
        self.endings[point.name] = ending
        self._tell(point, ending)

    def _may_begin(self, point: Point) -> bool:
        """Return whether no run is this one, or is training its dense network.

        Runs of a sweep whose launcher was killed go on without it.
        """
        if is_claimed(self._folder / point.name):
            return False
        if point.dense is None or self._trained(point) is not None:
            return True
        others = [other for other in self._points if other.dense == point.dense]
        return not any(
            other.name in self._running or is_claimed(self._folder / other.name) for other in others
        )

    def _trained(self, point: Point) -> Path | None:
        """Return a run's folder that has the trained dense network of this one; None without."""
        folders = (self._folder / each.name for each in self._points if each.dense == point.dense)
        return next((each for each in folders if (each / _DENSE).exists()), None)

    def _begin(self, point: Point) -> None:
        folder = self._folder / point.name
        folder.mkdir(exist_ok=True)
        source = None if point.dense is None else self._trained(point)
        if source is not None and not (folder / _DENSE).exists():
            _copy_dense(source, folder)
        command = CommandLine(
            tuple(self._command(point, folder)), str(self._folder / LOGS / f"{point.name}.txt")
        )
        self._tell(point, Ending("running"))
        self._running[point.name] = (point, self._launcher.start(command))

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        """Stop all running runs if the context raises."""
        try:
            yield
        except BaseException:
            for _, job in self._running.values():
                job.stop()
            raise


def _copy_dense(source: Path, folder: Path) -> None:
    """Copy the trained dense network, and the history of its training for the report."""
    shutil.rmtree(folder / _TRAINING, ignore_errors=True)  # of an unfinished training
    if (source / _TRAINING / NAME).exists():
        (folder / _TRAINING).mkdir()
        shutil.copyfile(source / _TRAINING / NAME, folder / _TRAINING / NAME)
    with replacement(folder / _DENSE) as path:
        shutil.copyfile(source / _DENSE, path)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (a closed terminal) like Ctrl-C within the context."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), _interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run_words(
    recipe: Path, overrides: Sequence[str], data_root: Path | None, report: bool
) -> Callable[[Point, Path], list[str]]:
    """Return the function from a point to the words of its ``l0prune run`` command."""
    root = data_root or os.environ.get("L0PRUNE_DATA")
    options = [*(["--data-root", os.path.abspath(root)] if root else [])]
    options += [] if report else ["--no-report"]

    def words(point: Point, folder: Path) -> list[str]:
        settings = [*overrides, *point.overrides]
        start = [sys.executable, "-P", "-m", "l0prune", "run", str(recipe.resolve()), *settings]
        return [*start, "--out", str(folder.resolve()), *options]

    return words
