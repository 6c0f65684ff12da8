"""``choose_exits``: thresholds for an export's early exits, with their cost and metric."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from l0prune.capture.example_inputs import first_rows
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import one_at_a_time
from l0prune.errors import CertificateError, UsageError, warn
from l0prune.exporting.certify.certificate import Certificate
from l0prune.exporting.certify.dtypes import CPU, converted, placed
from l0prune.exporting.onnx.file import describe
from l0prune.exporting.result import Export
from l0prune.features.exits.criteria import criterion_of
from l0prune.features.exits.deciding import EarlyExit
from l0prune.features.exits.file import ExitFile, times, write
from l0prune.features.exits.network import ExitNetwork
from l0prune.features.exits.thresholds import HeldOut, choose, never
from l0prune.features.exits.ways import (
    MEASURES,
    Seen,
    macs_of_ways,
    seen_by,
)
from l0prune.files.atomic import replacement
from l0prune.plan.limits import Limit, limits
from l0prune.plan.measures import Latency, kind_of
from l0prune.plan.numbers import THREADS, check_whole, tolerance_of
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage
from l0prune.running.environment import as_html
from l0prune.running.task import Task, is_split

_BATCH = 100


@dataclass(frozen=True)
class Exit:
    """Threshold, share, metric and cost of one exit, on the held-out examples.

    Attributes:
        at: path of the module whose output the exit reads; ``the end`` for the last exit.
        threshold: least score at which the exit answers; infinite where it never does.
        share: share of the examples that the exit answers.
        alone: the metric if the exit answered all examples.
        cost: of one example that leaves at the exit, in the unit of the measure.
    """

    at: str
    threshold: float
    share: float
    alone: float
    cost: float


@dataclass
class EarlyExits:
    """Exported network that stops at the first exit whose score reaches its threshold.

    Attributes:
        module: of torch, in float32 on the CPU; ``module.decide(x)`` also says which exit answers.
        exits: the early exits, then the end of the network.
        criterion: name of the criterion that scores the answers of exits.
        measure: name of the measure of the costs.
        metric: name of the metric.
        value: the metric with these exits, on the held-out examples.
        last: the metric of the network's end, on the held-out examples.
        examples: number of held-out examples.
        rounding: decisions with at most this margin may differ in another runtime; see
            ``save_onnx``.
        certificate: of the export, and of the file, once one was written.
    """

    module: EarlyExit
    exits: tuple[Exit, ...]
    criterion: str
    measure: str
    metric: str
    value: float
    last: float
    examples: int
    rounding: float
    certificate: Certificate
    _small: Export = field(repr=False)
    _inputs: Sequence[Inputs] = field(repr=False)

    @property
    def expected(self) -> float:
        """Mean cost of a held-out example, in the unit of the measure."""
        return sum(each.share * each.cost for each in self.exits)

    @property
    def whole(self) -> float:
        """Cost of an example that goes through all exits to the end."""
        return self.exits[-1].cost

    @one_at_a_time()
    def save_onnx(self, path: str | os.PathLike[str]) -> Path:
        """Write one ONNX file that computes no further than the exit that answers.

        All nodes after an exit are inside an ``If``, for one example at a time; the file of
        ``Export.save_onnx`` computes all exits of any batch. Outputs are ``logits``, ``exit`` (its
        number, from 0) and ``margin``: the least distance to the opposite decision, in units of
        the score. If it is at most ``rounding``, another runtime may leave at another exit. Every
        way through the file is compared with the gated model. For other thresholds set
        ``module.thresholds`` and write the file anew.

        Raises:
            CertificateError: the outputs of a way differ, or torch leaves at another exit.
            FileError: the file cannot be written.
            L0pruneError: torch's exporter has no translation, or ONNX Runtime does not take it.
        """
        target = Path(path)
        with replacement(target) as unfinished:
            write(self.module, self._inputs[0], unfinished)
            file = ExitFile(unfinished, self._small.pieces[0], len(self.exits) - 1)
            certificate = self._small.certificate.without("onnx").with_checks(file.checks())
            self._check_decisions(file)
            facts = {
                "certificate": json.dumps(certificate.to_dict()),
                "exits": json.dumps(self.to_dict()),
                "batch": "1 only: split larger batches into examples",
            }
            describe(unfinished, facts)
        self.certificate = certificate
        return target

    @stage("comparing the decisions of the file with those of torch")
    def _check_decisions(self, file: ExitFile) -> None:
        """Raise CertificateError where file and torch differ in the exit by more than rounding."""
        for number, (args, kwargs) in enumerate(self._inputs):
            with torch.no_grad():
                mine = self.module.decide(*args, **kwargs)
            _, exit_, margin = file.decide((args, kwargs))
            if int(mine.exit) != exit_ and min(float(mine.margin), margin) > self.rounding:
                raise CertificateError(
                    f"Held-out example {number} leaves the file at exit {exit_} and torch's "
                    f"module at {int(mine.exit)}, with a margin of {margin:.2g}, where "
                    f"{self.rounding:.2g} is rounding. Nothing was written: please report this "
                    "with the model's code."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain data; infinite thresholds are texts, ``inf`` or ``-inf``."""
        return {
            "criterion": self.criterion,
            "thresholds": [
                each.threshold if np.isfinite(each.threshold) else str(each.threshold)
                for each in self.exits[:-1]
            ],
            "at": [each.at for each in self.exits[:-1]],
            "shares": [each.share for each in self.exits],
            "alone": [each.alone for each in self.exits],
            "measure": self.measure,
            "costs": [each.cost for each in self.exits],
            "expected": self.expected,
            "metric": self.metric,
            "value": self.value,
            "last": self.last,
            "held_out": self.examples,
            "rounding": self.rounding,
        }

    def __repr__(self) -> str:
        kind = kind_of(self.measure)
        shares = ", ".join(f"{each.share:.0%} at {each.at}" for each in self.exits)
        return (
            f"EarlyExits({shares}; {kind.brief(self.expected)} expected of "
            f"{kind.brief(self.whole)}; {self.metric} {self.value:.4g}, at the end "
            f"{self.last:.4g})"
        )

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One row for each exit."""
        kind = kind_of(self.measure)
        table = Table("exit", f"{self.criterion} from", "answers", self.metric, kind.label)
        for each in self.exits:
            threshold = "" if each is self.exits[-1] else f"{each.threshold:.4g}"
            cost = kind.brief(each.cost)
            table.add_row(each.at, threshold, f"{each.share:.1%}", f"{each.alone:.4g}", cost)
        table.add_row("together", "", "", f"{self.value:.4g}", kind.brief(self.expected))
        yield table
        yield Text(f"On {self.examples} held-out examples, one at a time.")


@one_at_a_time()
@displayed
def choose_exits(
    small: Export,
    data: Any,
    *,
    budget: Any = None,
    tolerance: float | str | None = None,
    criterion: str = "confidence",
    measure: str = "macs",
    threads: int = 1,
    loss: Any = None,
    metric: Any = None,
    batch_size: int = _BATCH,
    progress: bool = True,
) -> EarlyExits:
    """Choose the thresholds of an export's early exits on held-out examples.

    Args:
        small: the export of a network with exits (``add_exits``).
        data: held-out examples with targets: batches, a dataset, or a split; of a data source, a
            pair or a ``Task`` the test part. Test the result on others.
        budget: the most that an example may cost on average: ``"latency=8ms"``, ``"macs=0.5"`` (a
            share of the way to the end of this export).
        tolerance: in place of a budget, how much worse than the last exit's the metric may be, in
            absolute terms: ``"1%"`` of the error rate is one example in a hundred.
        criterion: ``"confidence"`` (the largest probability), ``"entropy"`` (1 − H / ln C) or
            ``"patience"`` (how many exits before agree); or one of your own.
        measure: what is spared under a tolerance: ``"macs"``, or ``"latency"``, which is measured
            by ONNX Runtime on this machine at batch 1.
        threads: that a call may use, in latency.
        loss, metric: see ``Task``; the metric is what counts as a mistake, the rate of wrong
            classes where nothing else is asked for, else the loss.
        batch_size: examples at a time, where the source lets us choose.
        progress: show progress on stderr.

    Raises:
        DataError: there are no examples, or they do not fit the network.
        UsageError: neither a budget nor a tolerance is given, or both; a budget is less than the
            first exit takes; the export has no exits, is in parts, or takes no single example.
    """
    check_whole("threads", threads, most=THREADS)
    check_whole("batch_size", batch_size)
    limit, allowed = _asked(budget, tolerance, measure)
    early = _early(small, criterion)
    task = _task(data, loss, metric)
    with stage("asking all exits for held-out examples"):
        seen = seen_by(early, task, batch_size)
    costs = _costs(early, small, seen, limit.measure if limit else measure, threads)
    held_out = seen.held_out(costs, bool(task.larger_is_better))
    thresholds = _choose(held_out, limit, allowed)
    early.thresholds = torch.from_numpy(thresholds).float()
    result = _result(early, small, task, seen, held_out, limit.measure if limit else measure)
    for text in _complaints(result):
        warn(text)
    return result


def _asked(
    budget: Any, tolerance: float | str | None, measure: str
) -> tuple[Limit | None, float | None]:
    """Return the budget, or the tolerance."""
    if (budget is None) == (tolerance is None):
        raise UsageError(
            "give either a budget, such as budget='latency=8ms' or 'macs=0.5', or a tolerance, "
            "such as tolerance='1%'"
        )
    if measure not in MEASURES:
        raise UsageError(f"measure is {' or '.join(MEASURES)}, not {measure!r}")
    if tolerance is not None:
        return None, tolerance_of(tolerance)
    found = limits(budget)
    if len(found) != 1 or found[0].glob != "*" or found[0].measure not in MEASURES:
        raise UsageError(
            f"a budget of exits is one limit of the whole network, in {' or '.join(MEASURES)}"
        )
    return found[0], None


def _early(small: Export, criterion: str) -> EarlyExit:
    """Return the early-exit module of an export, with infinite thresholds."""
    if not isinstance(small, Export):
        raise UsageError(
            f"thresholds are chosen for an export, not for a {type(small).__name__}: "
            "l0prune.gate(model, args), then small = l0prune.export(model)"
        )
    names = [] if small.in_parts else _tensors_of(small)
    if not names or names[0] != "logits" or len(names) < 2:
        raise UsageError(
            "this export has no early exits: put them on the network before it is gated, "
            "model = l0prune.add_exits(model, args), and train it"
        )
    batches = small.pieces[0].takes
    if not small.dynamic and not batches.startswith("1 "):
        raise UsageError(
            "an early exit is taken for one example at a time, and this export is for batches of "
            f"{batches}: gate with an example of one, or let the batch be free (small.note says "
            "why it is not)"
        )
    network = placed(converted(small.module, torch.float32), CPU).eval()
    thresholds = torch.full((len(names) - 1,), torch.inf)
    return EarlyExit(network, criterion_of(criterion), thresholds).eval()


def _tensors_of(small: Export) -> tuple[str, ...]:
    """Return the names of the outputs if they are those of a network with exits; else none."""
    (piece,) = small.pieces
    names = piece.answers[0].names
    rest = tuple(f"exits_{number}" for number in range(len(names) - 1))
    return names if names == ("logits", *rest) else ()


def _task(data: Any, loss: Any, metric: Any) -> Task:
    """Return the task of the data; data without a test part become the test part."""
    alone = is_split(data) or (not isinstance(data, Task) and Task.of(data).test is None)
    return Task.of(([], data) if alone else data, loss, metric)


def _costs(early: EarlyExit, small: Export, seen: Seen, measure: str, threads: int) -> Any:
    """Return the cost of one example up to each exit, in the unit of the measure."""
    first = seen.inputs[0]
    if measure != Latency.name:
        return macs_of_ways(early, first)
    with tempfile.TemporaryDirectory() as folder, stage("timing each way through the network"):
        path = Path(folder) / "exits.onnx"
        write(early, first, path)
        return times(path, first_rows(first), small.pieces[0], len(early.thresholds), threads)


def _choose(held_out: HeldOut, limit: Limit | None, allowed: float | None) -> Any:
    """Return the best thresholds under the budget or the tolerance.

    Raises:
        UsageError: the budget cannot be met.
    """
    whole = held_out.costs[-1]
    if limit is None:
        assert allowed is not None
        most = held_out.result(never(held_out))[0] + allowed + 1e-12

        def objective(errors: Any, costs: Any) -> Any:
            return np.where(errors <= most, costs / whole, np.inf)
    else:
        spend = limit.most(whole) * (1 + 1e-9)

        def objective(errors: Any, costs: Any) -> Any:
            return np.where(costs <= spend, errors + 1e-9 * costs / whole, np.inf)

    found = choose(held_out, objective)
    if found is None:
        assert limit is not None
        kind = kind_of(limit.measure)
        raise UsageError(
            f"the budget {limit} cannot be met: leaving at the first exit always takes "
            f"{kind.brief(held_out.costs.min())}, all of the network {kind.brief(whole)}. "
            "Cut more of it, or put an exit earlier"
        )
    return found


def _result(
    early: EarlyExit, small: Export, task: Task, seen: Seen, held_out: HeldOut, measure: str
) -> EarlyExits:
    """Return shares, metrics and costs under the chosen thresholds."""
    thresholds = early.thresholds.double().numpy()
    ways = held_out.ways(thresholds)
    alone = seen.values.mean(1)
    count = len(thresholds)
    network = early.network
    at = network.at if isinstance(network, ExitNetwork) else [f"exit {n}" for n in range(count)]
    exits = tuple(
        Exit(path, float(threshold), float((ways == n).mean()), float(alone[n]), float(cost))
        for n, (path, threshold, cost) in enumerate(
            zip((*at, "the end"), (*thresholds, -np.inf), held_out.costs, strict=True)
        )
    )
    tolerance = max(c.tolerance for c in small.certificate.checks if c.dtype == "float32")
    return EarlyExits(
        module=early,
        exits=exits,
        criterion=early.criterion.name,
        measure=measure,
        metric=task.metric_name,
        value=float(seen.values[ways, np.arange(len(ways))].mean()),
        last=float(alone[-1]),
        examples=len(ways),
        rounding=early.criterion.steepness * tolerance * seen.scale,
        certificate=small.certificate,
        _small=small,
        _inputs=seen.inputs,
    )


def _complaints(result: EarlyExits) -> Sequence[str]:
    """Return warnings about exits that answer no example, or every one that reaches them."""
    found, left = [], 1.0
    for number, each in enumerate(result.exits[:-1]):
        if each.share == 0 and left > 0:
            found.append(
                f"exit {number} ({each.at}) answers no held-out example: its head costs time and "
                "saves none. Allow more (tolerance, budget), train it longer, or leave it out "
                "(add_exits(at=…))"
            )
        elif left > 0 and each.share >= left - 1e-9:
            found.append(
                f"exit {number} ({each.at}) answers every example that reaches it: what follows "
                "is never computed. End the network there, or ask for less error"
            )
        left -= each.share
    return found
