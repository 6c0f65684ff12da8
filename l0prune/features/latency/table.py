"""Latency table: the time of a network at any widths on one runtime, and its file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from torch import nn

from l0prune.errors import FileError, UsageError
from l0prune.exporting.onnx import collect
from l0prune.features.latency.facts import Group, Name, plan_id
from l0prune.features.latency.latency import Observe, TimedLatency
from l0prune.features.latency.latency_model import LatencyModel, Milliseconds
from l0prune.features.latency.onnx_files import Job, Runtime
from l0prune.features.latency.runtimes import runtime_of
from l0prune.files.atomic import write_whole
from l0prune.files.checked_json import check_seal, parsed, read_json, sealed
from l0prune.files.plan_check import check_layouts
from l0prune.plan.numbers import LARGEST, MOST, THREADS
from l0prune.plan.plan import Plan
from l0prune.progress.stages import stage


@dataclass(frozen=True)
class Setting:
    """Runtime, machine, threads and batch that times belong to.

    Attributes:
        runtime: its name, such as ``onnxruntime-int8`` or ``eager``.
        provider: what runs it, such as ``CPUExecutionProvider`` or ``cpu``.
        processor, system: of the machine.
    """

    runtime: str
    version: str
    provider: str
    threads: Annotated[int, Field(ge=1, le=THREADS)]
    batch: Annotated[int, Field(ge=1, le=MOST)]
    processor: str
    system: str

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return (
            f"{self.runtime} {self.version}, {self.provider}, {threads}, batch {self.batch}, "
            f"{self.processor}"
        )


def _runtime_here(setting: Setting) -> Runtime | None:
    """Return the runtime of this setting if it is here: on this machine, and in that version."""
    here = collect.machine()
    if (setting.processor, setting.system) != (here["processor"], here["system"]):
        return None
    try:
        runtime = runtime_of(setting.runtime, setting.provider)
    except UsageError:
        return None
    return runtime if runtime.version == setting.version else None


def _bench_of(setting: Setting, model: nn.Module) -> tuple[Observe, Path] | None:
    """Return the timer of a gated model's networks in this setting, and the folder of its files.

    None if the runtime is not here.
    """
    runtime = _runtime_here(setting)
    if runtime is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="l0prune-"))
    job = Job(model, folder, setting.threads, setting.batch)
    with stage(f"writing networks of other widths for {setting.runtime}, to time choices of them"):
        return runtime.bench(job), folder


FORMAT = 2
_NOISY = 0.05  # noise of the times (``Quality.noise``) from which on the table warns
_WRONG = 0.05
_KIND = "l0prune latency table"
_POSITIONS = 2**40  # of all layouts, at most; no network reads or writes more
_Width = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=LARGEST)]


@dataclass(frozen=True)
class Quality:
    """Errors of the prediction on held-out networks, |predicted over measured − 1|.

    Attributes:
        noise: spread of repeated timings of a network over the dense one's: half of all are within
            this share.
    """

    median: _Share
    worst: _Share
    networks: Annotated[int, Field(ge=1, le=MOST)]
    noise: _Share

    def __str__(self) -> str:
        return (
            f"predicts {self.networks} networks that it has not seen to {self.median:.1%} "
            f"(median) and {self.worst:.1%} (worst)"
        )


@dataclass(frozen=True)
class LatencyTable:
    """Milliseconds of one network at any widths, on one runtime.

    Give it to ``finetune``, ``fit`` or ``Pruner`` as ``latency=``; a budget may then be
    ``"latency=12ms"`` or ``"latency=0.5"``, a share of the dense network's time.

    Attributes:
        setting: runtime and machine of the times.
        plan: id of the plan that the table was made for.
        dense: milliseconds of the dense network.
        groups: groups of nodes that are timed as one.
        model: times of the groups and of the runtime itself, at any widths.
        smooth: smooth approximation of ``model``, for learning gates.
        quality: errors of the prediction.
        samples: widths and milliseconds of each network that was timed.
        command: the command line that made the table; empty where it was made in Python.
    """

    setting: Setting
    plan: Name
    dense: Annotated[Milliseconds, Field(gt=0)]
    groups: tuple[Group, ...]
    model: LatencyModel
    smooth: LatencyModel
    quality: Quality
    samples: tuple[tuple[tuple[_Width, ...], Milliseconds], ...] = field(default=(), repr=False)
    command: Name = ""
    _benches: list[Observe | None] = field(default_factory=list, repr=False, compare=False)
    _measures: list[Any] = field(default_factory=list, repr=False, compare=False)

    name = "latency"

    def of(self, plan: Plan) -> TimedLatency:
        """Return the measure of a network with this plan: for the same plan the same one.

        Raises:
            UsageError: the table is of another network, or of layouts that this one lacks.
        """
        for known in self._measures:
            if known.plan is plan:
                return known  # type: ignore[no-any-return]
        if plan_id(plan) != self.plan:
            raise UsageError(
                "this latency table was made for another model, or for the same with other gates: "
                "make one for this (l0prune measure model.gated.pt, or l0prune.measure(model))"
            )
        layouts = {*self.model.layouts, *self.smooth.layouts}
        layouts.update(layout for group in self.groups for layout in group.layouts)
        try:
            check_layouts(layouts, plan.axes, _POSITIONS)
        except ValueError as error:
            raise UsageError(f"this latency table does not fit its model: {error}") from error
        found = TimedLatency(
            plan, self.groups, self.model, self.smooth, self.dense, self._observing
        )
        self._measures[:] = [found]  # which finds the preferred widths once
        return found

    def _observing(self, model: nn.Module) -> Observe | None:
        """Return the timer of the model's networks in the table's setting; None elsewhere."""
        if not self._benches:
            found = _bench_of(self.setting, model)
            if found is None:
                self._benches.append(None)
            else:
                self.observe_by(*found)
        return self._benches[0]

    def observe_by(self, observe: Observe, folder: Path) -> None:
        """Set the timer of the model's networks; the folder of its files is removed with it."""
        weakref.finalize(observe, shutil.rmtree, folder, ignore_errors=True)
        self._benches[:] = [observe]

    @property
    def is_of_here(self) -> bool:
        """Return whether the table was made here: on this machine, with this runtime's version."""
        return _runtime_here(self.setting) is not None

    @property
    def warning(self) -> str:
        """Reason not to trust the table; empty if there is none."""
        if self.quality.noise > _NOISY:
            return (
                f"the machine is too noisy to trust these times: turns of one network, beside the "
                f"dense one, differ by {self.quality.noise:.0%}. Stop what else runs on it, and "
                "measure again"
            )
        if self.quality.median > _WRONG:
            return (
                f"the table predicts networks that it has not seen to {self.quality.median:.0%} "
                "only: time more of them (l0prune measure --samples), on a machine where nothing "
                "else runs"
            )
        return ""

    def __str__(self) -> str:
        return f"{self.setting}: dense {self.dense:.3g} ms; {self.quality}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        data = _TABLE.dump_python(self, mode="json", exclude={"_benches", "_measures"})
        return {"kind": _KIND, "format": FORMAT, **data}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LatencyTable:
        """Inverse of ``to_dict``.

        Raises:
            ValueError: the data is no table.
        """
        if data.get("kind") != _KIND or data.get("format") != FORMAT:
            raise ValueError("it is no latency table of this version of l0prune")
        table = parsed(_TABLE, {name: value for name, value in data.items() if name[0] != "_"})
        for model in (table.model, table.smooth):
            # The last group is the runtime itself.
            is_known = all(term.group <= len(table.groups) for term in model.terms)
            layouts = {step.layout for term in model.terms for step in term.steps}
            if not is_known or max(layouts, default=0) >= max(1, len(model.layouts)):
                raise ValueError("a term in it is of no group, or of a layout that is not there")
        return table

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as JSON.

        Raises:
            FileError: the file cannot be written.
        """
        write_whole(path, json.dumps(sealed(self.to_dict())))
        return Path(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LatencyTable:
        """Read what ``save`` wrote.

        Raises:
            FileError: there is no such file, or it is no latency table, or it was changed.
        """
        data = read_json(path, "`l0prune measure` writes a latency table.")
        try:
            table = LatencyTable.from_dict(data if isinstance(data, dict) else {})
            check_seal(data, path)
            return table
        except ValueError as error:
            raise FileError(
                f"{path} is no latency table: {error}. `l0prune measure` writes one"
            ) from error


_TABLE = TypeAdapter(LatencyTable)
