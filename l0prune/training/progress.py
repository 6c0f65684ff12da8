"""Progress of a run on stderr: a live line on a terminal, and one line an epoch anywhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from l0prune.training.history import Record, describe

_REFRESH = 0.1  # seconds


class Display:
    """Says how a run goes.

    Attributes:
        console: where; by default stderr.
    """

    def __init__(
        self, epochs: int, steps: int, *, shown: bool = True, console: Console | None = None
    ) -> None:
        self.console = console or Console(stderr=True, quiet=not shown, highlight=False)
        self._epochs = epochs
        self._steps = steps
        self._next = 0.0
        self._loss = ""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if shown and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]} {task.fields[phase]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )

    def start(self, done: int) -> None:
        """Begin, with so many steps of the run done already."""
        if self._bar is not None:
            total = self._epochs * self._steps
            fields: dict[str, Any] = {"epoch": "", "phase": "", "loss": ""}
            self._task = self._bar.add_task("", total=total, completed=done, **fields)
            self._bar.start()

    def step(self, done: int, phase: str) -> None:
        """So many steps of the run are done; cheap enough to be told after each."""
        if self._bar is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + _REFRESH
        epoch = f"{min(done // self._steps + 1, self._epochs)}/{self._epochs}"
        self._bar.update(self._task, completed=done, epoch=epoch, phase=phase, loss=self._loss)

    def loss(self, value: float) -> None:
        """The latest mean loss."""
        self._loss = f"loss {value:.4f}"

    def epoch(self, record: Record) -> None:
        """An epoch is done."""
        self.console.print(escape(describe(record, self._epochs)), soft_wrap=True)

    def note(self, text: str) -> None:
        """Something that the user should know."""
        self.console.print(escape(text), soft_wrap=True)

    def close(self) -> None:
        """Take the live line away."""
        if self._bar is not None:
            self._bar.stop()
