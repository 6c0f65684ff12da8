"""Display of long work on stderr: live on a terminal, elsewhere a line each 10 seconds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.text import Text

from l0prune.progress import stages
from l0prune.progress.launched import is_first_process
from l0prune.progress.stages import Work

LONG = 2.0  # seconds from which on a finished stage is printed
EVERY = 10.0  # seconds between lines without a terminal
_MINUTES, _HOURS = 90.0, 90 * 60.0  # from which on times are in these

F = TypeVar("F", bound=Callable[..., Any])


def duration(seconds: float) -> str:
    """Format seconds with about two digits: ``35 s``, ``4 min``, ``2 h 10 min``."""
    if seconds < _MINUTES:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if seconds < _HOURS:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def status(work: Work) -> str:
    """Describe how far work is: its share and the time left, else the time that it has taken."""
    share, left = work.share, work.left
    parts = [work.detail] if work.detail else []
    if share is None:
        parts.append(f"{duration(work.elapsed)} so far")
    else:
        parts.append(f"{share:.0%}")
        parts += [] if left is None else [f"{duration(left)} left"]
    return ", ".join(parts)


class Display:
    """Display of the works that go on, the outermost first.

    Args:
        console: where they are shown.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._works: list[Work] = []
        self._tasks: dict[int, TaskID] = {}
        self._last = 0.0  # when the last line was printed, or the first work began
        self._lock, self._over = threading.RLock(), threading.Event()
        self._live = Progress(
            SpinnerColumn(), _Name(), _Bar(), _Status(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show works within the context."""
        clock = threading.Thread(target=self._look_often, name="l0prune-display", daemon=True)
        watching = stages.works.watched(self.tell), stages.advanced.watched(self.look)
        with self._live, watching[0], watching[1]:
            if not self.console.is_terminal:
                clock.start()
            try:
                yield
            finally:
                self._over.set()

    def tell(self, work: Work) -> None:
        """Add work that begins, or remove it when it ends, with a line if it was a long stage."""
        with self._lock:
            if work.seconds is None:
                if not self._works:
                    self._last = stages.now()
                self._works.append(work)
                self._tasks[id(work)] = self._live.add_task("", work=work)
                return
            self._works.remove(work)
            self._live.remove_task(self._tasks.pop(id(work)))
            if not self._works and work.seconds >= LONG:
                self._print(f"{work.name}: {work.seconds:.1f} s")

    def look(self, _: Work | None = None) -> None:
        """Print a line if there is no terminal, and none was printed for ``EVERY`` seconds."""
        if self.console.is_terminal:
            return
        with self._lock:
            if self._works and stages.now() - self._last >= EVERY:
                self._print(self._line())

    def _line(self) -> str:
        """Describe the outermost work that counts its steps, and the part that goes on."""
        shown = next((each for each in self._works if each.share is not None), self._works[0])
        inner = self._works[-1]
        return f"{shown.name}: {status(shown)}" + ("" if inner is shown else f" ({inner.name})")

    def _print(self, line: str) -> None:
        self._last = stages.now()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _look_often(self) -> None:
        """Look while a step takes long."""
        while not self._over.wait(EVERY / 4):
            self.look()


class _Name(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["work"].name)


class _Bar(ProgressColumn):
    def render(self, task: Task) -> ProgressBar:
        share = task.fields["work"].share
        total = None if share is None else 1.0
        return ProgressBar(total, share or 0.0, 20, animation_time=task.get_time())


class _Status(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(status(task.fields["work"]))


_present: ContextVar[Display | None] = ContextVar("display", default=None)


def console_of(*, quiet: bool) -> Console:
    """Return the console on which work is shown now; by default stderr."""
    outer = _present.get()
    if outer is not None and not quiet:
        return outer.console
    return Console(stderr=True, quiet=quiet, highlight=False)


@contextmanager
def shown(wanted: bool = True, console: Console | None = None) -> Iterator[Display]:
    """Show long work on the console, by default stderr, within the context.

    Within another such context nothing changes: the outermost one decides.
    """
    outer = _present.get()
    if outer is not None:
        yield outer
        return
    quiet = not (wanted and is_first_process())
    display = Display(console or console_of(quiet=quiet))
    token = _present.set(display)
    try:
        if quiet:
            yield display
        else:
            with display.running():
                yield display
    finally:
        _present.reset(token)


def displayed(function: F) -> F:
    """Decorate a public function: its work is shown on stderr, unless ``progress=False``."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with shown(bool(kwargs.get("progress", True))):
            return function(*args, **kwargs)

    return cast(F, run)
