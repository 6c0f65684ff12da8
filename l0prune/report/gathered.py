"""Collection of a report's data from exports, histories, tables of times and files.

Every layer of a network before and after a cut, in the order in which the forward meets them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.weights import Weight, weights_of
from l0prune.errors import FileError, UsageError
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.times import Times
from l0prune.exporting.result import Export
from l0prune.gating.attaching import gates_of, holder
from l0prune.plan.branch import is_needed
from l0prune.plan.cost import cost_of
from l0prune.plan.layout import Layout, leaves
from l0prune.plan.plan import Cost, Plan
from l0prune.plan.switches import gone
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
from l0prune.report.layers import UNKNOWN, Sides, costs_of, layers_of
from l0prune.report.layers import Layer as Found
from l0prune.report.layers import Side as FoundSide
from l0prune.report.survey import Survey
from l0prune.report.trainings import budgets_of, metric_of, seconds_of
from l0prune.running.environment import environment
from l0prune.timing.table import LatencyTable, Setting

UNGATED = "no gate was put on it"


def axes_of(plan: Plan, kept: Tensor) -> list[Axis]:
    """The axes that had gates; of heads, which of them stayed.

    Args:
        plan: of the network before the cut.
        kept: the slots that stay; bool, flat, shape ``(plan.size,)``.
    """
    found = []
    for axis in plan.axes:
        left = kept[axis.slice].nonzero().flatten().tolist()
        slots = left if axis.kind == "head" else None
        found.append(
            Axis(name=axis.name, kind=axis.kind, before=axis.size, after=len(left), kept=slots)
        )
    return found


def layers_before_and_after(
    plan: Plan, kept: Tensor, weights: Sequence[Weight], otherwise: str = UNGATED
) -> list[Layer]:
    """Widths, params and MACs of each layer before the cut and after it.

    Args:
        plan: of the network before the cut.
        kept: as for ``axes_of``.
        weights: its layers.
        otherwise: why a side stays whole of which the plan says nothing.
    """
    counted = {cost.tensor for cost in plan.costs if cost.unit == "params"}
    of_all = {plan.aliases.get(name, name) for weight in weights for name in weight.tensors}
    found = layers_of(plan, weights, of_all - counted, otherwise)
    costs = costs_of(plan, weights)
    numbers = {axis.name: number for number, axis in enumerate(plan.axes)}
    pairs = zip(weights, found, strict=True)
    layers = {w.name: _layer(plan, kept, w, of, costs[w.name], numbers) for w, of in pairs}
    return [layers[name] for name in _in_order(plan, costs)]


def _in_order(plan: Plan, costs: dict[str, list[Cost]]) -> list[str]:
    """The layers' names by where the forward first works with them; last, those it never does."""
    places = {id(cost): place for place, cost in enumerate(plan.costs)}
    first = {
        name: min((places[id(each)] for each in of), default=len(places))
        for name, of in costs.items()
    }
    return sorted(costs, key=first.__getitem__)


def _layer(
    plan: Plan,
    kept: Tensor,
    weight: Weight,
    found: Found,
    costs: Sequence[Cost],
    numbers: dict[str, int],
) -> Layer:
    layouts = Sides(plan, weight).layouts() if found.used else ([], [])
    sides = [
        _side(plan, kept, side, of, numbers)
        for side, of in zip((found.input, found.output), layouts, strict=True)
    ]
    branch = _gone_with(plan, kept, costs)
    if branch:
        why = f"the branch {branch} is gone"
        sides = [side.model_copy(update={"after": 0, "reason": why}) for side in sides]
    return Layer(
        name=found.name,
        kind=found.kind,
        input=sides[0],
        output=sides[1],
        params=Pair(before=found.params, after=_amount(plan, kept, costs, "params")),
        macs=Pair(before=found.macs, after=_amount(plan, kept, costs, "macs")),
    )


def _gone_with(plan: Plan, kept: Tensor, costs: Sequence[Cost]) -> str:
    """The branch that is gone and had all of the layer to itself; empty where there is none."""
    names = gone(plan, kept)
    mine = [cost.needed for cost in costs if cost.unit == "params"]
    if not mine or any(is_needed(of, names) for of in mine):
        return ""
    return next(name for name in names if any(name in each for of in mine for each in of))


def _side(
    plan: Plan, kept: Tensor, side: FoundSide, layouts: Sequence[Layout], numbers: dict[str, int]
) -> Side:
    """A side that lies on several dims (positions × channels) is as wide as those with an axis."""
    cut = [layout for layout in layouts if any(leaves(layout))]
    before, after = side.size, side.size
    if cut:
        before, after = prod(dim.size for dim in cut), _left(plan, kept, cut)
    axes = [numbers[name] for name in side.axes]
    return Side(before=before, after=after, axes=axes, reason=side.reason)


def _left(plan: Plan, kept: Tensor, layouts: Sequence[Layout]) -> int:
    return prod(int(plan.mask(layout, kept).sum()) for layout in layouts)


def _amount(plan: Plan, kept: Tensor, costs: Sequence[Cost], unit: str) -> int:
    of_unit = (cost for cost in costs if cost.unit == unit)
    return round(sum(cost.scale * _left(plan, kept, cost.dims) for cost in of_unit))


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
