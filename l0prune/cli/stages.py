"""The stages of an export on stderr: live on a terminal, and a line for each that took long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from l0prune.running.stages import Stage, watched

LONG = 2.0  # seconds from which on a stage leaves a line


@contextmanager
def announced(say: Callable[[str], None]) -> Iterator[None]:
    """Within the context a stage is said when it begins, unless it is part of another one."""
    depth = 0

    def tell(stage: Stage) -> None:
        nonlocal depth
        if stage.seconds is None and not depth:
            say(stage.name)
        depth += 1 if stage.seconds is None else -1

    with watched(tell):
        yield


@contextmanager
def shown(console: Console) -> Iterator[None]:
    """Within the context the stages of the work are shown on this console."""
    live = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def show(stage: Stage) -> None:
        if stage.seconds is None:
            live.add_task(stage.name)
            return
        live.remove_task(live.task_ids[-1])
        if stage.seconds >= LONG:
            console.print(f"{stage.name}: {stage.seconds:.1f} s", highlight=False, soft_wrap=True)

    with live, watched(show):
        yield
