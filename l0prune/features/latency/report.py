"""Time by layer, as a section of the report."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.features.latency.table import LatencyTable, Setting
from l0prune.gating.attaching import gates_of
from l0prune.plan.plan import Plan
from l0prune.report.content import Content, OwnerTime, Time, TimeByLayer


def add_time(content: Content, table: LatencyTable, model: nn.Module) -> Content:
    """Return the report with a latency table's prediction of a gated model's time.

    The table of another model is left out. Slots that only fill blocks are known from the last fit.

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
        timed=_measured_share(content.gain.time, table.setting),
    )
    return content.model_copy(update={"time": found})


def _filling(content: Content) -> dict[str, int]:
    """Return the number of slots that the last fit kept only to fill blocks, by axis."""
    fits = [content.fit, *(training.fit for training in content.trainings)]
    return next((fit.filling for fit in reversed(fits) if fit is not None), {})


def _asked(plan: Plan, open_: Tensor, filling: Mapping[str, int]) -> Tensor:
    """Return the mask of open slots without the last ones of each axis that only fill blocks."""
    asked = open_.clone()
    for axis in plan.axes:
        slots = axis.start + open_[axis.slice].nonzero().flatten()
        asked[slots[len(slots) - filling.get(axis.name, 0) :]] = False
    return asked


def _measured_share(time: Time | None, setting: Setting) -> float | None:
    """Return the time ratio that the export measured, if its setting was that of the table."""
    if time is None:
        return None
    mine = (f"{setting.runtime} {setting.version}", setting.threads, setting.batch)
    is_same = (time.runtime, time.threads, time.batch) == mine
    return time.share if is_same and time.processor == setting.processor else None
