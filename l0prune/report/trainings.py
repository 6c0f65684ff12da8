"""A stage of training for the report: from its records, in memory or in the folder of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from l0prune.errors import FileError
from l0prune.files.checked_json import read_json, read_text
from l0prune.report.content import Amount, Asked, BudgetState, Epoch, Fit, Metric, Training
from l0prune.running.task import LOSS, RECORD_KEYS, amount_keys, amounts
from l0prune.training.history import FACTS, NAME, History, Record

_OWN = ("metric", "larger_is_better", "epochs", "steps", "warmup", "settle")  # facts with a place
_PLAIN = ("seconds", "lr", "train_loss", "penalty", "training_macs", LOSS)  # numbers of a record


def training_of(history: History, name: str = "finetune") -> Training:
    """A run of ``finetune`` or ``train_dense``.

    Args:
        history: what it returned.
        name: of the stage.
    """
    return _training(name, history.records, history.all_facts)


def training_in(folder: Path, name: str) -> Training | None:
    """Return the training recorded in a folder; None if it has not begun.

    Raises:
        FileError: its records are damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        records = [json.loads(line) for line in read_text(path).splitlines()]
        facts = read_json(folder / FACTS) if (folder / FACTS).exists() else {}
        return _training(name, records, facts)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        reason = "a record of the wrong form" if isinstance(error, ValidationError) else repr(error)
        raise FileError(f"{path} is damaged: {reason}") from error


def _training(name: str, records: Sequence[Record], facts: Mapping[str, Any]) -> Training:
    metric = str(facts.get("metric") or _metric(records))
    is_gated = any("open" in record for record in records)
    rest = {name: value for name, value in facts.items() if name not in _OWN}
    return Training(
        name=name,
        metric=metric,
        larger_is_better=bool(facts.get("larger_is_better", False)),
        planned=facts.get("epochs"),
        steps=facts.get("steps"),
        warmup=facts.get("warmup") if is_gated else None,
        settle=facts.get("settle") if is_gated else None,
        before=_finite(records[0].get("before", {})) if records else {},
        epochs=[_epoch(record, metric) for record in records],
        fit=_fit(records),
        facts=rest,
    )


def _fit(records: Sequence[Record]) -> Fit | None:
    """Return the choice of widths, if recorded."""
    found = next((record["fitted"] for record in reversed(records) if "fitted" in record), None)
    return None if found is None else Fit.model_validate(found)


def _epoch(record: Record, metric: str) -> Epoch:
    numbers = _finite({name: record.get(name) for name in _PLAIN})
    of_measures = {
        name: Amount(expected=of.expected, actual=of.actual, dense=of.dense)
        for name, of in amounts(record).items()
    }
    return Epoch(
        epoch=record["epoch"],
        step=record["step"] if "step" in record else record["epoch"],
        phase=record["phase"],
        metric=_finite({metric: record.get(metric)}).get(metric),
        amounts=of_measures,
        budgets={text: BudgetState(**of) for text, of in record.get("budget", {}).items()},
        gates=record.get("gates", []),
        doctor=record.get("doctor", {}),
        **numbers,
    )


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Without what is no number, such as the loss of a run that diverged."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _metric(records: Sequence[Record]) -> str:
    """The name of the metric, where nobody has noted it."""
    last = records[-1] if records else {}
    taken = RECORD_KEYS.union(*map(amount_keys, amounts(last)))
    found = (name for name, value in last.items() if name not in taken and type(value) is float)
    return next(found, LOSS if LOSS in last else "")


def budgets_of(trainings: Sequence[Training]) -> list[Asked]:
    """Return the budgets of the last training that had any, with the amounts reached.

    What was observed of the export counts where something was, not what was predicted.
    """
    for training in reversed(trainings):
        for epoch in training.epochs[-1:]:
            if epoch.budgets:
                looks = [] if training.fit is None else training.fit.looks
                seen = {each.budget: each.observed / each.dense for each in looks if each.chosen}
                found = epoch.budgets.items()
                return [
                    Asked(text=text, limit=of.limit, share=seen.get(text, of.share))
                    for text, of in found
                ]
    return []


def metric_of(trainings: Sequence[Training]) -> Metric | None:
    """The metric before the first gates and after the last epoch, where it was tested."""
    last = next((t for t in reversed(trainings) if t.epochs and t.metric), None)
    after = None if last is None else last.epochs[-1].metric
    if last is None or after is None:
        return None
    before = None
    for training in trainings:  # of one metric: another one does not compare
        if training.metric == last.metric and training.before:
            before = training.before.get(training.metric)
            break
        if training.metric == last.metric and _is_dense(training):
            before = training.epochs[-1].metric
    return Metric(
        name=last.metric, larger_is_better=last.larger_is_better, before=before, after=after
    )


def _is_dense(training: Training) -> bool:
    """Return whether the training was of the network before its gates."""
    return training.name == "dense" and bool(training.epochs)


def seconds_of(trainings: Sequence[Training]) -> float | None:
    """Seconds of all epochs, where they were taken."""
    found = [e.seconds for t in trainings for e in t.epochs if e.seconds is not None]
    return sum(found) if found else None
