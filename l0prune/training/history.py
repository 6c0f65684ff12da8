"""The record of a run: mean losses, records of epochs, their files, and progress on stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from l0prune.capture.threads import muted
from l0prune.errors import FileError, UsageError
from l0prune.files.atomic import write_whole
from l0prune.plan.measures import kind_of
from l0prune.progress.display import console_of, duration
from l0prune.progress.display import shown as shown_on
from l0prune.progress.stages import Counter, Work, now, work
from l0prune.running.environment import as_html
from l0prune.running.processes import ALONE, World
from l0prune.running.task import LOSS, RECORD_KEYS, Amount, amount_keys, amounts

_FEW = 8  # axes at most that are shown one by one
_ROWS = 20
IN_PERCENT = ("error", "accuracy", "label-error")


def describe(record: dict[str, Any], epochs: int) -> str:
    """Format a record as one line."""
    parts = [f"epoch {record['epoch']}/{epochs}", f"{record['phase']:7}"]
    parts.append(f"loss {record['train_loss']:.4f}")
    parts += measured(record)
    if "open" in record:
        parts += [f"{_label(name)} {share(name, of)}" for name, of in amounts(record).items()]
        parts.append(_widths(record["open"]))
    if "seconds" in record:
        parts.append(f"{record['seconds']:.1f} s")
    if record.get("dead"):
        parts.append(f"no open gate left in {', '.join(record['dead'])}")
    return "  ".join(parts)


def measured(record: dict[str, Any]) -> list[str]:
    """Format the metrics on the test data, or else the test loss; empty without either."""
    taken = RECORD_KEYS.union(*map(amount_keys, amounts(record)))
    metrics = [n for n, v in record.items() if n not in taken and isinstance(v, float)]
    if not metrics and LOSS in record:
        return [f"test loss {record[LOSS]:.4g}"]
    return [
        f"{name} {100 * record[name]:.2f} %" if name in IN_PERCENT else f"{name} {record[name]:.4g}"
        for name in metrics
    ]


def table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one record per row; of many epochs a subset with the last one."""
    every = max(1, math.ceil(len(records) / _ROWS))
    shown = records[::-every][::-1]
    title = f"{len(records)} epochs" + (f", one in {every}" if every > 1 else "")
    measures = dict.fromkeys(name for record in shown for name in amounts(record))
    columns = ("epoch", "phase", "loss", "on the test data", *map(_label, measures))
    result = Table(*columns, title=title)
    for record in shown:
        found = amounts(record) if "open" in record else {}
        result.add_row(
            str(record["epoch"]),
            record["phase"],
            f"{record['train_loss']:.4f}",
            Text(", ".join(measured(record))),
            *(share(name, found[name]) if name in found else "" for name in measures),
        )
    return result


def share(name: str, amount: Amount) -> str:
    """Format an export's amount in this measure, and its share of the dense amount."""
    if not amount.dense:
        return "0"
    return f"{kind_of(name).brief(amount.actual)} ({100 * amount.actual / amount.dense:.1f} %)"


def _label(name: str) -> str:
    return kind_of(name).label


def _widths(counts: dict[str, int]) -> str:
    if len(counts) <= _FEW:
        return "-".join(map(str, counts.values()))
    return f"{sum(counts.values())} open"


NAME, FACTS = "metrics.jsonl", "run.json"

Record = dict[str, Any]


@dataclass
class History:
    """Records of a run, one for each epoch, in order.

    Each has ``epoch`` (from 1), ``step`` (steps done), ``phase`` (at its end), ``seconds``,
    ``train_loss`` and ``penalty`` (means over its steps), ``lr``, and with test data ``test_loss``
    and the metric, if there is one, under its name (see ``Task``): ``error`` where the targets are
    classes and nothing else is asked for.

    A gated model's also have ``expected_params`` and ``expected_macs`` (of one example),
    ``params`` and ``macs`` (what an export now would have), ``dense_params`` and ``dense_macs``,
    the same three of each other measure in the budget (``expected_latency``, …),
    ``open`` (slots an export would keep, by axis), ``dead`` (axes that have no open gate left) and
    ``training_macs`` (of all steps so far, as a share of what they take at the whole size).
    With budgets there is ``budget``: for each its ``limit``, the ``target`` that has come down to
    it so far, the real ``share`` now, all of the dense count, and its ``multiplier``. ``gates`` is
    how many gates there are in each of 20 bins of P(z ≠ 0), from 0 to 1. Once the gates are fixed,
    ``fitted`` is how their widths were chosen: how many slots of an axis only fill whole blocks
    (``filling``), and the predicted and observed amounts of each choice that was tried
    (``looks``). ``doctor`` has problems and their remedies, if there are any. The model measured
    is the averaged one with its gates as in eval mode: the one that ``finetune`` leaves behind.
    The first record has under ``before`` the measurements on the test data before the first step,
    with all gates bypassed.

    Attributes:
        records: the records.
        metric: name of the metric by which records compare; where they have none, the test loss
            counts, and without test data the training loss.
        larger_is_better: of the metric.
        facts: facts known before the run's first step: its settings as text, its phases in steps,
            the command, versions and the machine. ``run.json`` holds them where there is a
            folder.
    """

    records: list[Record] = field(default_factory=list)
    metric: str = "error"
    larger_is_better: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> Record:
        """The record of the last epoch, which describes the present model."""
        if not self.records:
            raise UsageError("this run has no whole epoch yet")
        return self.records[-1]

    @property
    def best(self) -> Record:
        """The record with the best metric in the phase that the run has reached.

        Earlier phases have larger models, whose errors do not compare.
        """
        phase = self.last["phase"]
        key = next(k for k in (self.metric, "test_loss", "train_loss") if k in self.last)
        sign = -1 if self.larger_is_better and key == self.metric else 1
        of_phase = (record for record in self.records if record["phase"] == phase)
        return min(of_phase, key=lambda record: sign * float(record[key]))

    @property
    def all_facts(self) -> dict[str, Any]:
        """``facts``, and the metric by which records compare."""
        return {"metric": self.metric, "larger_is_better": self.larger_is_better, **self.facts}

    @property
    def complaints(self) -> dict[str, str]:
        """Complaints of the doctor in the whole run, by their subject."""
        return {about: text for r in self.records for about, text in r.get("doctor", {}).items()}

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        last = describe(self.last, len(self)) if self.records else "no whole epoch yet"
        return f"History({last})"

    def __rich__(self) -> Table:
        return table(self.records)

    def _repr_html_(self) -> str:
        return as_html(self)


class Log:
    """Writer of records into a folder, one by one."""

    def __init__(self, folder: Path, history: History, tensorboard: bool | None) -> None:
        self._path = folder / NAME
        text = "".join(map(_line, history.records))
        # A run that was killed between two epochs may have written one record too many.
        write_whole(self._path, text)
        write_whole(folder / FACTS, json.dumps(history.all_facts, indent=2))
        self._curves = _curves(folder, len(history), tensorboard)

    def write(self, record: Record) -> None:
        """Append one record."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
        except OSError as error:
            raise FileError(f"{self._path} cannot be written: {error}") from error
        if self._curves is not None:
            for name, value in _scalars(record):
                self._curves.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self._curves is not None:
            self._curves.close()


def _line(record: Record) -> str:
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Replace nan and inf, which JSON lacks and a user's metric may be, by None."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: Record) -> list[tuple[str, float]]:
    """Return a record's numbers by name, open slots of axes as ``open/NAME``."""
    flat = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "epoch"}
    flat |= {f"open/{axis}": count for axis, count in record.get("open", {}).items()}
    return list(flat.items())


def _curves(folder: Path, done: int, wanted: bool | None) -> Any:
    """Return a TensorBoard writer, or None."""
    if wanted is False:
        return None
    try:
        with muted():  # its imports give deprecation warnings
            from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        if wanted:
            raise UsageError(
                "tensorboard is not installed: pip install 'l0prune[tensorboard]'"
            ) from error
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)


_REFRESH = 0.1  # seconds
_TIMED = 1.0, 4  # seconds and steps, at least, by which the time of a run is estimated
_LONG = 10.0  # seconds from which on a run is told how long it will take


class Display:
    """Display of a run's progress on a console, by default stderr."""

    def __init__(
        self, epochs: int, steps: int, *, shown: bool = True, console: Console | None = None
    ) -> None:
        self.console = console or console_of(quiet=not shown)
        self._epochs, self._steps, self._total = epochs, steps, epochs * steps
        self._next = 0.0
        self._loss = ""
        self._within = ExitStack()
        self._work: Work | None = None
        self._counter: Counter | None = None
        self._first: tuple[int, float] | None = None  # steps that were done, and when
        self._is_estimated = False
        self._test = 0.0  # seconds of a test

    def start(self, done: int) -> None:
        """Start the progress bar, with ``done`` steps of the run done already."""
        self._bar = self._within.enter_context(shown_on(not self.console.quiet, self.console))
        self._work = self._within.enter_context(work("training"))
        self._counter = self._within.enter_context(self._work.counting(self._total, done))

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Time the test before the first step: after each epoch there is one."""
        began = now()
        yield
        self._test = now() - began

    def step(self, done: int, phase: str) -> None:
        """Show that ``done`` steps of the run are done; cheap enough to call after each."""
        moment = now()
        if not self._is_estimated:
            self._estimate(done, moment)
        if self._work is None or self._counter is None or moment < self._next:
            return
        self._next = moment + _REFRESH
        epoch = f"{min(done // self._steps + 1, self._epochs)}/{self._epochs}"
        self._work.name = f"epoch {epoch} {phase}"
        self._work.detail = ", ".join(filter(None, (f"{done}/{self._total}", self._loss)))
        self._counter.at(done, self._total)

    def _estimate(self, done: int, moment: float) -> None:
        """Say how long the run will take, once some steps are timed; not of a short one."""
        if self._first is None:  # the first step takes longer
            self._first = done, moment
            return
        count, seconds = done - self._first[0], moment - self._first[1]
        if count < _TIMED[1] or seconds < _TIMED[0]:
            return
        self._is_estimated = True
        each, left = seconds / count, self._total - done
        tests = self._epochs - done // self._steps
        whole = left * each + tests * self._test
        if whole >= _LONG:
            with_tests = f" and {tests} tests of {self._test:.2g} s" if self._test else ""
            one = f"{each:.2g} s" if each >= 0.1 else f"{1e3 * each:.2g} ms"
            self.note(
                f"this run will take about {duration(whole)}: {left:,} steps of {one}"
                f"{with_tests}, by the first {count}"
            )

    def loss(self, value: float) -> None:
        """Set the latest mean loss."""
        self._loss = f"loss {value:.4f}"

    def epoch(self, record: Record) -> None:
        """Print the record of a finished epoch."""
        self.note(describe(record, self._epochs))

    def note(self, text: str) -> None:
        """Print a message to the user."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._work is not None:
            self._work.name = "training"
        self._within.close()


LOOK_EVERY = 50  # steps


class NotFinite(Exception):
    """A loss was nan or inf, ``ago`` steps before the last one."""

    def __init__(self, ago: int, value: float) -> None:
        super().__init__(ago, value)
        self.ago = ago
        self.value = value


class Meter:
    """Sums of the losses of an epoch, fetched from the device only at ``look``.

    Losses are means over all processes, which look after the same steps.
    """

    def __init__(
        self,
        *,
        forgiving: bool,
        loss: float = 0.0,
        penalty: float = 0.0,
        count: int = 0,
        world: World = ALONE,
    ) -> None:
        self.loss, self.penalty, self.count = loss, penalty, count
        self._world = world
        # With fp16 the loss scaler leaves out steps that overflow, until its scale fits.
        self._forgiving = forgiving
        self._losses: list[Tensor] = []
        self._penalties: list[Tensor] = []

    def add(self, loss: Tensor, penalty: Tensor | None) -> None:
        """Add the loss and the penalty of one step."""
        self._losses.append(loss.detach())
        if penalty is not None:
            self._penalties.append(penalty.detach())

    @property
    def is_due(self) -> bool:
        """Return whether the losses are due to be fetched."""
        return len(self._losses) >= LOOK_EVERY

    def look(self) -> float | None:
        """Return the mean loss since the last look; None if there was no step."""
        if not self._losses:
            return None
        losses: list[float] = self._world.mean_(torch.stack(self._losses)).tolist()
        penalties: list[float] = torch.stack(self._penalties).tolist() if self._penalties else []
        self._losses, self._penalties = [], []
        good = [value for value in losses if math.isfinite(value)]
        if len(good) < len(losses) and not (self._forgiving and good):
            first = next(n for n, value in enumerate(losses) if not math.isfinite(value))
            raise NotFinite(len(losses) - 1 - first, losses[first])
        # One after another, so that the sum does not depend on when we look.
        for value in good:
            self.loss += value
        for value in penalties:
            self.penalty += value
        self.count += len(good)
        return sum(good) / len(good)

    def means(self) -> tuple[float, float]:
        """Mean task loss and mean penalty of the steps looked at."""
        count = max(self.count, 1)
        return self.loss / count, self.penalty / count
