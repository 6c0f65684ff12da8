"""Data of a report, collected from exports, gated models, surveys, trainings and latency tables."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from l0prune.capture.weights import weights_of
from l0prune.errors import FileError
from l0prune.exporting.onnx.speedup import Speedup
from l0prune.exporting.result import Export
from l0prune.files.checked_json import read_json, read_text
from l0prune.gating.attaching import holder
from l0prune.plan.cost import cost_of
from l0prune.report.content import (
    Axis,
    BudgetResult,
    BudgetState,
    Comparison,
    Content,
    CostState,
    Epoch,
    Fit,
    Gain,
    LayerBits,
    LayerChange,
    Metric,
    Pair,
    Repeat,
    StoredFile,
    Time,
    Training,
)
from l0prune.report.layers import UNKNOWN, axes_before_and_after, layers_before_and_after
from l0prune.report.survey import Survey
from l0prune.running.environment import environment
from l0prune.running.task import LOSS, RECORD_KEYS, amount_keys, amounts
from l0prune.training.history import FACTS, NAME, History, Record

_ENVIRONMENT = ("command", "versions", "machine", "seed", "device", "preprocessing")


def now() -> str:
    """Return the current time in the format of reports: UTC, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def from_export(small: Export, first: Export | None = None) -> Content:
    """Return the report of an export.

    ``first`` is the export of the first of several rounds: its dense network is compared with.
    """
    first = first or small
    layers, axes = _cuts_of(small)
    if first is not small:
        first_layers, first_axes = _cuts_of(first)
        layers, axes = _layers_since(first_layers, layers), _axes_since(first_axes, axes)
    there = files = [file for file in small.files if file.is_file()]  # others were deleted since
    if small.in_fewer_bits:  # only the float32 file counts, with its weights
        files = [each for each in there if each.name.startswith(small.files[0].name)]
    size, times = sum(file.stat().st_size for file in files), small.times
    before = None if times is None else times.dense_bytes
    return Content(
        title=type(small.module).__name__,
        made=now(),
        gain=Gain(
            params=Pair(before=first.params_before, after=small.params),
            macs=Pair(before=first.macs_before, after=small.macs),
            bytes=Pair(before=before, after=size) if size else None,
            time=None if small.speedup is None else _time(small.speedup),
        ),
        certificate=[Comparison(**check) for check in small.certificate.to_dict()],
        notes="\n".join(filter(None, (small.note, *_notes_on_others(small)))),
        axes=axes,
        layers=layers,
        bits=[] if small.ranges is None else _bits(small.ranges.by_layer),
        repeat=repeat_facts(there).model_copy(update={"preprocessing": small.preprocessing}),
    )


def from_model(model: nn.Module) -> Content:
    """Return the report of a gated model, with the counts of an export at its current gates.

    Raises:
        NotGated: the model carries no gates.
    """
    gated, gates = holder(model)
    plan, open_ = gates.plan, gates.open().cpu()
    kept, cost = plan.kept(open_), cost_of(plan)
    return Content(
        title=type(gated).__name__,
        made=now(),
        gain=Gain(
            params=Pair(before=cost.dense("params"), after=cost.actual(open_, "params")),
            macs=Pair(before=cost.dense("macs"), after=cost.actual(open_, "macs")),
        ),
        axes=axes_before_and_after(plan, kept),
        layers=layers_before_and_after(plan, kept, weights_of(gated)),
        bits=[] if gates.quantizer is None else _bits(gates.quantizer.by_layer),
        repeat=repeat_facts(()),
    )


def _bits(by_layer: Mapping[str, tuple[int, int]]) -> list[LayerBits]:
    pairs = by_layer.items()
    return [LayerBits(name=name, weight=bits[0], input=bits[1]) for name, bits in pairs]


def from_survey(survey: Survey) -> Content:
    """Return the report of a survey; ``after`` is the amount that gates can remove."""
    plan = survey.plan
    nothing = torch.zeros(plan.size, dtype=torch.bool)
    totals = {"params": survey.params, "macs": survey.macs}
    gone = {
        name: Pair(before=total, after=round(total * survey.reachable(name)))
        for name, total in totals.items()
    }
    layers = layers_before_and_after(plan, nothing, survey.weights, UNKNOWN)
    return Content(
        title="Survey",
        made=now(),
        about="survey",
        gain=Gain(params=gone["params"], macs=gone["macs"]),
        axes=axes_before_and_after(plan, torch.ones(plan.size, dtype=torch.bool)),
        layers=[_reachable(layer) for layer in layers],
        repeat=repeat_facts(()),
    )


def _reachable(layer: LayerChange) -> LayerChange:
    """Return the layer with the amounts that gates can remove as ``after``."""
    changed = {}
    for name in ("input", "output", "params", "macs"):
        amount = getattr(layer, name)
        changed[name] = amount.model_copy(update={"after": amount.before - amount.after})
    return layer.model_copy(update=changed)


def add_trainings(content: Content, trainings: Sequence[Training]) -> Content:
    """Return the report with these stages of training, their metric, budgets and duration."""
    found = {"seconds": seconds_of(trainings), "metric": metric_of(trainings)}
    repeat = _filled(content.repeat, trainings[-1].facts if trainings else {})
    return content.model_copy(
        update={
            "trainings": list(trainings),
            "budgets": budgets_of(trainings),
            "gain": content.gain.model_copy(
                update={name: value for name, value in found.items() if value is not None}
            ),
            "repeat": repeat,
        }
    )


def _filled(repeat: Repeat, facts: Mapping[str, Any]) -> Repeat:
    """Fill gaps in the instructions from a training's recorded environment."""
    known = repeat.model_dump()
    empty = {name: facts[name] for name in _ENVIRONMENT if name in facts and not known[name]}
    return Repeat.model_validate(known | empty)


def repeat_facts(files: Sequence[Path], recipe: Mapping[str, Any] | None = None) -> Repeat:
    """Return the instructions to repeat the run in this environment.

    Raises:
        FileError: a file cannot be read.
    """
    return Repeat(
        **environment(),
        recipe=None if recipe is None else dict(recipe),
        files=[file_facts(file) for file in files],
    )


def file_facts(path: Path) -> StoredFile:
    """Return a file's name, size and checksum.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return StoredFile(name=path.name, bytes=path.stat().st_size, sha256=digest.hexdigest())
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error


def _time(speedup: Speedup) -> Time:
    times = speedup.times
    return Time(
        before=times.before,
        after=times.after,
        spread=times.spread,
        threads=times.threads,
        batch=times.batch,
        runtime=times.runtime,
        processor=times.processor,
        asked=list(speedup.asked),
        ideal=speedup.ideal,
        losses=[str(loss) for loss in speedup.losses],
        advice=list(speedup.advice),
    )


def _notes_on_others(small: Export) -> list[str]:
    found = []
    for name, other in small.in_fewer_bits.items():
        said = (each[:1].upper() + each[1:] for each in other.warnings)
        found.append(" ".join((f"In {name}: {other}.", *(f"{each}." for each in said))))
    return found


def _cuts_of(small: Export) -> tuple[list[LayerChange], list[Axis]]:
    layers = layers_before_and_after(small.plan, small.kept, small.weights)
    return layers, axes_before_and_after(small.plan, small.kept)


def _layers_since(first: Sequence[LayerChange], last: Sequence[LayerChange]) -> list[LayerChange]:
    """Return the last round's layers, with the amounts before the first round as ``before``."""
    earlier = {layer.name: layer for layer in first}

    def since(layer: LayerChange) -> LayerChange:
        if layer.name not in earlier:
            return layer
        old, changed = earlier[layer.name], {}
        for name in ("input", "output", "params", "macs"):
            before = getattr(old, name).before
            changed[name] = getattr(layer, name).model_copy(update={"before": before})
        return layer.model_copy(update=changed)

    return [since(layer) for layer in last]


def _axes_since(first: Sequence[Axis], last: Sequence[Axis]) -> list[Axis]:
    """Return the last round's axes, with sizes before the first; heads cut twice lose ``kept``."""
    sizes = {axis.name: axis.before for axis in first}
    return [
        axis
        if sizes.get(axis.name, axis.before) == axis.before
        else axis.model_copy(update={"before": sizes[axis.name], "kept": None})
        for axis in last
    ]


_OWN = ("metric", "larger_is_better", "epochs", "steps", "warmup", "settle")  # facts with a field
_PLAIN = ("seconds", "lr", "train_loss", "penalty", "training_macs", LOSS)  # numbers of a record


def training_of(history: History) -> Training:
    """Return the data of a run of ``finetune`` or ``train_dense``, from the returned history."""
    return _training("", history.records, history.all_facts)


def training_in(folder: Path, name: str = "") -> Training | None:
    """Return the training recorded in a folder; None if it has not begun.

    The default ``name`` of the stage is ``finetune`` with gates and ``dense`` without.
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
    metric = str(facts.get("metric") or _metric_in(records))
    is_gated = any("open" in record for record in records)
    fit = next((record["fitted"] for record in reversed(records) if "fitted" in record), None)
    rest = {name: value for name, value in facts.items() if name not in _OWN}
    return Training(
        name=name or ("finetune" if is_gated else "dense"),
        metric=metric,
        larger_is_better=bool(facts.get("larger_is_better", False)),
        planned=facts.get("epochs"),
        steps=facts.get("steps"),
        warmup=facts.get("warmup") if is_gated else None,
        settle=facts.get("settle") if is_gated else None,
        before=_finite(records[0].get("before", {})) if records else {},
        epochs=[_epoch(record, metric) for record in records],
        fit=None if fit is None else Fit.model_validate(fit),
        facts=rest,
    )


def _epoch(record: Record, metric: str) -> Epoch:
    numbers = _finite({name: record.get(name) for name in _PLAIN})
    of_measures = {
        name: CostState(expected=of.expected, actual=of.actual, dense=of.dense)
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
    """Drop values that are not finite numbers, such as the loss of a run that diverged."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _metric_in(records: Sequence[Record]) -> str:
    """Return the name of the metric, found in records without one among their facts."""
    last = records[-1] if records else {}
    taken = RECORD_KEYS.union(*map(amount_keys, amounts(last)))
    found = (name for name, value in last.items() if name not in taken and type(value) is float)
    return next(found, LOSS if LOSS in last else "")


def budgets_of(trainings: Sequence[Training]) -> list[BudgetResult]:
    """Return the budgets of the last training that had any, with the amounts reached.

    Amounts observed of the export take precedence over predicted ones.
    """
    last = next((t for t in reversed(trainings) if t.epochs and t.epochs[-1].budgets), None)
    if last is None:
        return []
    looks = [] if last.fit is None else last.fit.looks
    observed = {look.budget: look.observed / look.dense for look in looks if look.chosen}
    return [
        BudgetResult(text=text, limit=state.limit, share=observed.get(text, state.share))
        for text, state in last.epochs[-1].budgets.items()
    ]


def metric_of(trainings: Sequence[Training]) -> Metric | None:
    """Return the metric before the first gates and after the last epoch; None if not tested."""
    last = next((t for t in reversed(trainings) if t.epochs and t.metric), None)
    after = None if last is None else last.epochs[-1].metric
    if last is None or after is None:
        return None
    before = None
    for training in trainings:  # other metrics cannot be compared
        if training.metric == last.metric and training.before:
            before = training.before.get(training.metric)
            break
        if training.metric == last.metric and training.name == "dense" and training.epochs:
            before = training.epochs[-1].metric
    return Metric(
        name=last.metric, larger_is_better=last.larger_is_better, before=before, after=after
    )


def seconds_of(trainings: Sequence[Training]) -> float | None:
    """Return the seconds of all epochs together; None if none were recorded."""
    found = [e.seconds for t in trainings for e in t.epochs if e.seconds is not None]
    return sum(found) if found else None
