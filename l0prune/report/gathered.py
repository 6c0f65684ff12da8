"""Collection of a report's data from exports, histories, tables of times and files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.weights import weights_of
from l0prune.cost.model import cost_of
from l0prune.errors import FileError, UsageError
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.times import Times
from l0prune.exporting.result import Export
from l0prune.gating.attaching import gates_of, holder
from l0prune.plan.plan import Plan
from l0prune.report.content import (
    Axis,
    Comparison,
    Content,
    Gain,
    Layer,
    OwnerTime,
    Pair,
    Repeat,
    Side,
    Stored,
    Time,
    TimeByLayer,
    Training,
)
from l0prune.report.cut import axes_of, layers_before_and_after
from l0prune.report.layers import UNKNOWN
from l0prune.report.survey import Survey
from l0prune.report.trainings import budgets_of, metric_of, seconds_of
from l0prune.running.environment import environment
from l0prune.timing.setting import Setting
from l0prune.timing.table import LatencyTable

_ENVIRONMENT = ("command", "versions", "machine", "seed", "device", "preprocessing")


def now() -> str:
    """The time as a report has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def of_export(dense: Export, first: Export | None = None) -> Content:
    """Return the report of an export.

    Args:
        dense: the export.
        first: that of the first of several rounds, whose network is what there was before.
    """
    first = first or dense
    layers = layers_before_and_after(dense.plan, dense.kept, dense.weights)
    axes = axes_of(dense.plan, dense.kept)
    if first is not dense:
        earlier = layers_before_and_after(first.plan, first.kept, first.weights)
        layers, axes = _since(earlier, layers), _axes_since(axes_of(first.plan, first.kept), axes)
    size, times = sum(file.stat().st_size for file in dense.files), dense.times
    before = None if times is None else times.dense_bytes
    return Content(
        title=type(dense.module).__name__,
        made=now(),
        gain=Gain(
            params=Pair(before=first.params_before, after=dense.params),
            macs=Pair(before=first.macs_before, after=dense.macs),
            bytes=Pair(before=before, after=size) if size else None,
            time=None if times is None else _time(times),
        ),
        certificate=[Comparison(**check) for check in dense.certificate.to_dict()],
        notes=dense.note,
        axes=axes,
        layers=layers,
        repeat=repeated(dense.files).model_copy(update={"preprocessing": dense.preprocessing}),
    )


def of_model(model: nn.Module) -> Content:
    """Return the report of a gated model: the counts of an export with its gates as they are.

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
        axes=axes_of(plan, kept),
        layers=layers_before_and_after(plan, kept, weights_of(gated)),
        repeat=repeated(()),
    )


def of_survey(survey: Survey) -> Content:
    """Return the report of a survey; ``after`` is without all that gates can remove."""
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
        axes=axes_of(plan, torch.ones(plan.size, dtype=torch.bool)),
        layers=[_reached(layer) for layer in layers],
        repeat=repeated(()),
    )


def _reached(layer: Layer) -> Layer:
    """Return the layer with the largest cut that gates can make."""
    sides = {
        name: side.model_copy(update={"after": side.before - side.after})
        for name, side in (("input", layer.input), ("output", layer.output))
    }
    pairs = {
        name: Pair(before=pair.before, after=(pair.before or 0) - pair.after)
        for name, pair in (("params", layer.params), ("macs", layer.macs))
    }
    return layer.model_copy(update={**sides, **pairs})


def with_trainings(content: Content, trainings: Sequence[Training]) -> Content:
    """The report with these stages of training, and what follows from them."""
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
    """Fill gaps in the instructions with what a training recorded of its environment."""
    known = repeat.model_dump()
    empty = {name: facts[name] for name in _ENVIRONMENT if name in facts and not known[name]}
    return Repeat.model_validate(known | empty)


def with_time(content: Content, table: LatencyTable, model: nn.Module) -> Content:
    """The report with what a latency table predicts of a gated model.

    It is left as it is where the table is of another one.

    Args:
        content: with the trainings, which say what only fills blocks.
        table: of times.
        model: with the gates that were exported.

    Raises:
        NotGated: the model carries no gates.
    """
    gates = gates_of(model)
    try:
        measure = table.of(gates.plan)
    except UsageError:
        return content
    kept = gates.plan.kept(gates.open())
    asked = _asked(gates.plan, kept & gates.open().cpu(), _filling(content))
    before = measure.by_owner(torch.ones(len(kept), dtype=torch.float64))
    after = measure.by_owner(kept.to(torch.float64))
    filling = measure.filling_by_owner(kept, asked)
    found = TimeByLayer(
        setting=str(table.setting),
        measured=table.dense,
        quality=str(table.quality),
        owners=[
            OwnerTime(
                name=name,
                before=before.get(name, 0.0),
                after=after.get(name, 0.0),
                filling=filling.get(name, 0.0),
            )
            for name in dict.fromkeys((*before, *after))
        ],
        timed=_timed(content.gain.time, table.setting),
    )
    return content.model_copy(update={"time": found})


def _filling(content: Content) -> dict[str, int]:
    """Return the number of slots that the last choice of widths kept to fill blocks, by axis."""
    fits = [content.fit, *(training.fit for training in content.trainings)]
    return next((fit.filling for fit in reversed(fits) if fit is not None), {})


def _asked(plan: Plan, open_: Tensor, filling: Mapping[str, int]) -> Tensor:
    """The open slots without as many of each axis as only fill blocks; which, makes no odds."""
    asked = open_.clone()
    for axis in plan.axes:
        slots = axis.start + open_[axis.slice].nonzero().flatten()
        asked[slots[len(slots) - filling.get(axis.name, 0) :]] = False
    return asked


def _timed(time: Time | None, setting: Setting) -> float | None:
    """The share of an export's own turns, where they were taken as those of a table."""
    if time is None:
        return None
    mine = (f"{setting.runtime} {setting.version}", setting.threads, setting.batch)
    is_same = (time.runtime, time.threads, time.batch) == mine
    return time.share if is_same and time.processor == setting.processor else None


def repeated(files: Sequence[Path], recipe: Mapping[str, Any] | None = None) -> Repeat:
    """Return the instructions to repeat the run in this environment.

    Raises:
        FileError: a file cannot be read.
    """
    return Repeat(
        **environment(),
        recipe=None if recipe is None else dict(recipe),
        files=[stored(file) for file in files],
    )


def stored(path: Path) -> Stored:
    """A file's size and checksum.

    Raises:
        FileError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return Stored(name=path.name, bytes=path.stat().st_size, sha256=digest.hexdigest())
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error


def _time(times: Times) -> Time:
    return Time(
        before=collect.typical(times.dense),
        after=collect.typical(times.small),
        spread=times.spread,
        threads=times.threads,
        batch=times.batch,
        runtime=times.runtime,
        processor=times.processor,
    )


def _since(first: Sequence[Layer], last: Sequence[Layer]) -> list[Layer]:
    """The last round's layers with what they were before the first one."""
    earlier = {layer.name: layer for layer in first}

    def since(layer: Layer) -> Layer:
        if layer.name not in earlier:
            return layer
        old = earlier[layer.name]
        return layer.model_copy(
            update={
                "input": _side_since(old.input, layer.input),
                "output": _side_since(old.output, layer.output),
                "params": Pair(before=old.params.before, after=layer.params.after),
                "macs": Pair(before=old.macs.before, after=layer.macs.after),
            }
        )

    return [since(layer) for layer in last]


def _side_since(old: Side, new: Side) -> Side:
    return new.model_copy(update={"before": old.before})


def _axes_since(first: Sequence[Axis], last: Sequence[Axis]) -> list[Axis]:
    """The last round's axes at their first sizes; which heads stayed is numbered anew each time."""
    sizes = {axis.name: axis.before for axis in first}
    return [
        axis
        if sizes.get(axis.name, axis.before) == axis.before
        else axis.model_copy(update={"before": sizes[axis.name], "kept": None})
        for axis in last
    ]
