"""Stages of long work, announced to watchers, and how much of each is done.

    with watched(print):
        l0prune.export(model)

A stage is announced when it begins, and again when it is done. Loops in it count their steps
(``steps``, ``counting``), also nested, and in stages within it: ``Work.share`` is the part that is
done. Without a watcher nothing happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Events(Generic[T]):
    """Events of one kind, and their watchers in the current context."""

    def __init__(self, name: str) -> None:
        self._watchers: ContextVar[tuple[Callable[[T], None], ...]] = ContextVar(name, default=())

    @contextmanager
    def watched(self, watcher: Callable[[T], None]) -> Iterator[None]:
        """Pass each event within the context to ``watcher``."""
        token = self._watchers.set((*self._watchers.get(), watcher))
        try:
            yield
        finally:
            self._watchers.reset(token)

    def emit(self, event: T) -> None:
        """Call all watchers with an event."""
        for watcher in self._watchers.get():
            watcher(event)


@dataclass(frozen=True)
class Stage:
    """Stage that begins (``seconds`` is None), or ended after ``seconds``."""

    name: str
    seconds: float | None = None


class _Level:
    """A loop of some work: its steps that are done, and the weight of the present one."""

    def __init__(self, of: float, before: float = 0.0) -> None:
        self.of, self.done, self.weight = of, 0.0, 1.0
        self.before = before  # steps that an earlier run has done
        self.began = now()


class Work:
    """Work that goes on, such as a stage.

    Attributes:
        name: in messages.
        detail: what is shown beside the share, such as a loss.
        inner: the stage within it that goes on.
        seconds: how long it took; None while it goes on.
    """

    def __init__(self, name: str) -> None:
        self.name, self.detail = name, ""
        self.inner: Work | None = None
        self.seconds: float | None = None
        self.began = now()
        self._levels: list[_Level] = []
        self._most = 0.0  # the largest share so far

    @property
    def share(self) -> float | None:
        """The part that is done, from 0 to 1; None where it counts no steps."""
        levels = [*self._levels]
        share = self._share(levels)
        if share is None:
            return None
        before, of = levels[0].before, levels[0].of
        return (before + share * of) / (before + of)

    def _share(self, levels: list[_Level]) -> float | None:
        if not levels:
            return None
        work = self.inner
        while work is not None:
            levels = [*levels, *work._levels]
            work = work.inner
        share = 0.0
        for level in reversed(levels):
            share = min(1.0, (level.done + level.weight * share) / level.of)
        self._most = max(share, self._most)  # stages of one step may count by turns
        return self._most

    @property
    def left(self) -> float | None:
        """Seconds until all steps are done if they go on as they did; None if unknown."""
        levels = [*self._levels]
        share = self._share(levels)
        if not share:
            return None
        return (now() - levels[0].began) * (1 - share) / share

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return now() - self.began

    @contextmanager
    def counting(self, of: float, done: float = 0.0) -> Iterator[Counter]:
        """Count ``of`` steps within the context, of which ``done`` were done before."""
        level = _Level(max(of - done, 1e-9), done)
        if not self._levels:
            self._most = 0.0
        counter = Counter(self, level, done)
        self._levels.append(level)
        try:
            yield counter
        finally:
            self._levels.remove(level)


class Counter:
    """Number of steps of a loop that are done."""

    def __init__(self, work: Work, level: _Level, before: float = 0.0) -> None:
        self._work, self._level, self._before = work, level, before

    @contextmanager
    def takes(self, weight: float) -> Iterator[None]:
        """Count the context as so many steps, of which loops in it count parts."""
        self._level.weight = weight
        yield
        self._level.weight = 1.0
        self.step(weight)

    def step(self, amount: float = 1.0) -> None:
        """Count a step as done."""
        self._level.done += amount
        advanced.emit(self._work)

    def at(self, done: float, of: float) -> None:
        """Set how many steps are done, and of how many."""
        self._level.done = done - self._before
        self._level.of = max(of - self._before, 1e-9)
        advanced.emit(self._work)


def now() -> float:
    """Return the seconds of a clock that never goes back."""
    return time.monotonic()


_stages: Events[Stage] = Events("stages")
watched = _stages.watched
works: Events[Work] = Events("works")  # when each begins, and when it ends
advanced: Events[Work] = Events("advanced")  # after each step

_chain: ContextVar[tuple[Work, ...]] = ContextVar("chain", default=())


@contextmanager
def work(name: str) -> Iterator[Work]:
    """Yield the work that goes on in the context."""
    mine, outer = Work(name), _chain.get()
    token = _chain.set((*outer, mine))
    if outer:
        outer[-1].inner = mine
    works.emit(mine)
    try:
        yield mine
    finally:
        mine.seconds = mine.elapsed
        if outer:
            outer[-1].inner = None
        _chain.reset(token)
        works.emit(mine)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Announce the context, or the decorated function, as a stage of this name."""
    start = now()
    _stages.emit(Stage(name))
    try:
        with work(name):
            yield
    finally:
        _stages.emit(Stage(name, now() - start))


@contextmanager
def counting(of: float) -> Iterator[Counter]:
    """Count ``of`` steps of the stage that goes on."""
    chain = _chain.get()
    with (chain[-1] if chain else Work("")).counting(of) as counter:
        yield counter


def steps(items: Iterable[T], of: int | None = None) -> Iterator[T]:
    """Yield the items, and count each as a step of the stage that goes on.

    Args:
        items: what is iterated over.
        of: how many there are; None for their length, without which nothing is counted.
    """
    if of is None and not isinstance(items, Sized):
        yield from items
        return
    with counting(len(items) if of is None else of) as counter:  # type: ignore[arg-type]
        for item in items:
            yield item
            counter.step()
