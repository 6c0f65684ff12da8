"""Conditions of a measurement: runtime, machine, threads, batch."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch import nn

from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.plan.numbers import MOST, THREADS
from l0prune.running.stages import stage
from l0prune.timing.bundle import Job
from l0prune.timing.latency import Observe
from l0prune.timing.runtimes import runtime_of


@dataclass(frozen=True)
class Setting:
    """Runtime, machine, threads and batch that times belong to.

    Attributes:
        runtime: ``onnxruntime``, ``eager`` or ``compile``.
        version: of it.
        provider: what runs it, such as ``CPUExecutionProvider`` or ``cpu``.
        threads: that one call may use.
        batch: examples in a call.
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


def bench_of(setting: Setting, model: nn.Module) -> Observe | None:
    """Return the bench for a gated model in this setting; None if it is not available here.

    That is on another machine, or with another version of the runtime.
    """
    here = collect.machine()
    if (setting.processor, setting.system) != (here["processor"], here["system"]):
        return None
    try:
        runtime = runtime_of(setting.runtime, setting.provider)
    except UsageError:
        return None
    if runtime.version != setting.version:
        return None
    folder = Path(tempfile.mkdtemp(prefix="l0prune-"))
    job = Job(model, folder, setting.threads, setting.batch)
    with stage("preparing to time what is chosen"):
        observe = runtime.bench(job)
    weakref.finalize(observe, shutil.rmtree, folder, ignore_errors=True)
    return observe
